"""Where datasets are found, what is said where they are not, downloads from a server that cuts, refuses and lies, and
the real data where they are there.
"""

from __future__ import annotations

import gzip
import io
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ntkfl.data import ByWriter, load
from ntkfl.data.catalog import Remote, download, locate
from ntkfl.data.dataset import Dataset
from ntkfl.errors import DataError

BODY = np.random.default_rng(0).integers(0, 256, 200_000, np.uint8).tobytes()


def dated(content: bytes) -> bytes:
    """Compressed with a name and a date in the header, as distributions do."""
    buffer = io.BytesIO()
    with gzip.GzipFile("train", "wb", 6, buffer, mtime=1591315200) as file:
        file.write(content)
    return buffer.getvalue()


def test_places_are_tried_in_order(tiny: Any, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, cache = tiny.put(bare / "system" / "mnist", dated), bare / "cache" / "ntkfl" / "mnist"
    assert locate("mnist") == system
    assert len(load("mnist")) == 12
    tiny.put(cache, None)
    assert locate("mnist") == cache
    monkeypatch.setenv("NTKFL_DATA", str(bare))
    assert locate("mnist") == cache  # a folder without mnist/ is passed by
    tiny.put(bare / "mnist")
    assert locate("mnist") == bare / "mnist"
    monkeypatch.setenv("NTKFL_DATA", str(bare / "typo"))
    with pytest.raises(DataError, match=r"NTKFL_DATA is .*typo.*no folder"):
        load("mnist")
    assert tiny.host.requests == []


def test_what_is_nowhere_is_downloaded_into_the_cache(tiny: Any, bare: Path) -> None:
    dataset, cache = load("mnist"), bare / "cache" / "ntkfl" / "mnist"
    assert len(tiny.host.requests) == len(list(cache.glob("*.gz"))) == 4
    assert dataset.rows.x.shape == (12, 1, 28, 28)
    assert dataset.rows.x.flatten()[:3].tolist() == list(tiny.contents["train-images-idx3-ubyte"][16:19])
    assert dataset.test_rows.y.tolist() == [0, 1, 2, 3]
    (cache / "t10k-labels-idx1-ubyte.gz").unlink()
    load("mnist")
    assert tiny.host.requests[4:] == ["t10k-labels-idx1-ubyte.gz"]  # only what is missing


def test_no_data_and_no_network_is_two_lines(tiny: Any, bare: Path) -> None:
    tiny.host.statuses = [404]
    with pytest.raises(DataError) as caught:
        load("mnist")
    first, second = str(caught.value).split("\n")
    assert "mnist is not on this machine" in first
    assert str(bare / "system" / "mnist") in first
    assert "404" in first
    assert "`ntkfl data fetch mnist`" in second
    assert "NTKFL_DATA" in second


# --- downloads


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_cut_or_another_file_gets_no_name(host: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    remote = host.publish("a.gz", BODY)
    download([remote], tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder" / "a.gz").read_bytes() == BODY
    assert capfd.readouterr() == ("", "")  # no bar where there is no terminal
    shutil.rmtree(tmp_path / "new")
    for body in (BODY[:70_000], BODY[:-1] + bytes([BODY[-1] ^ 1]), bytes(5_000_000)):
        host.publish("a.gz", body)
        with pytest.raises(DataError, match=r"a\.gz: the \d+ bytes there are not the published 200000"):
            download([remote], tmp_path)
    host.cuts = [70_000]
    with pytest.raises(DataError, match="the 70000 bytes there"):
        download([remote], tmp_path)
    assert files(tmp_path) == []
    host.publish("a.gz", BODY)
    download([remote], tmp_path)
    assert files(tmp_path) == ["a.gz"]


def test_nobody_there_or_nothing_said_fails_at_once(tmp_path: Path) -> None:
    for listens, why in ((False, "refused"), (True, "timed out")):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            if listens:
                other.listen()
            start, remote = time.monotonic(), Remote(f"http://127.0.0.1:{other.getsockname()[1]}/a.gz", 3, "0" * 64)
            with pytest.raises(DataError, match=why):
                download([remote], tmp_path, timeout=0.2)
            assert time.monotonic() - start < 2


def test_a_folder_that_cannot_be_made_is_an_error(host: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"a\.gz: .*file"):
        download([host.publish("a.gz", BODY)], tmp_path / "file" / "folder")


# --- real data, where NTKFL_DATA names a folder that has it


def assert_normalised(dataset: Dataset, within: float = 1e-4) -> None:
    """The constants are the moments of all training pixels, to the four places they are given with."""
    for channel, (mean, std) in enumerate(zip(dataset.rows.mean, dataset.rows.std, strict=True)):
        levels = torch.bincount(dataset.rows.x[:, channel].flatten(), minlength=256).double()
        grey = torch.arange(256) / 255
        first, second = ((levels * grey**power).sum() / levels.sum() for power in (1, 2))
        assert first.item() == pytest.approx(mean, abs=within)
        assert (second - first**2).sqrt().item() == pytest.approx(std, abs=within)


def real(name: str) -> Dataset:
    if locate(name) is None:
        pytest.skip(f"{name} is not on this machine")
    return load(name)


@pytest.mark.parametrize(
    ("name", "shape", "test_rows", "first_labels"),
    [
        ("fashion-mnist", (60000, 1, 28, 28), 10000, [9, 0, 0, 3, 0]),
        ("mnist", (60000, 1, 28, 28), 10000, [5, 0, 4, 1, 9]),
        ("cifar10", (50000, 3, 32, 32), 10000, [6, 9, 9, 4, 1]),
        ("digits", (1442, 1, 8, 8), 355, [0, 1, 2, 3, 4]),
    ],
)
def test_the_real_files_are_read(name: str, shape: tuple[int, ...], test_rows: int, first_labels: list[int]) -> None:
    dataset = real(name)
    assert tuple(dataset.rows.x.shape) == shape
    assert len(dataset.test_rows.y) == test_rows
    assert dataset.rows.y[:5].tolist() == first_labels
    assert len(torch.bincount(dataset.rows.y)) == len(torch.bincount(dataset.test_rows.y)) == 10
    assert_normalised(dataset)


def test_real_writers_are_clients() -> None:
    dataset = real("femnist")
    assert_normalised(dataset, within=0.01)  # another sample of writers has slightly other moments
    federated = dataset.partition(ByWriter())
    assert dataset.writers is not None
    assert min(federated.sizes) >= 16
    for index in federated.indices:
        assert len(set(dataset.writers[index].tolist())) == 1
