"""Where datasets are found, what is said where they are not, and the real ones where they are there."""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ntkfl.data import ByWriter, catalog, load
from ntkfl.data.dataset import Dataset
from ntkfl.errors import DataError


def dated(content: bytes) -> bytes:
    """Compressed with a name and a date in the header, as distributions do."""
    buffer = io.BytesIO()
    with gzip.GzipFile("train", "wb", 6, buffer, mtime=1591315200) as file:
        file.write(content)
    return buffer.getvalue()


def test_places_are_tried_in_order(tiny: Any, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.put(bare / "system" / "mnist", dated)
    assert load("mnist").source == str(bare / "system" / "mnist")
    tiny.put(bare / "cache" / "ntkfl" / "mnist", None)
    assert load("mnist").source == str(bare / "cache" / "ntkfl" / "mnist")
    monkeypatch.setenv("NTKFL_DATA", str(bare))
    assert load("mnist").source == str(bare / "cache" / "ntkfl" / "mnist")  # a folder without mnist/ is passed by
    tiny.put(bare / "mnist")
    assert load("mnist").source == str(bare / "mnist")
    assert tiny.host.requests == []


def test_what_is_nowhere_is_downloaded_into_the_cache(tiny: Any, bare: Path) -> None:
    dataset = load("mnist")
    cache = bare / "cache" / "ntkfl" / "mnist"
    assert dataset.source == str(cache)
    assert len(tiny.host.requests) == len(list(cache.glob("*.gz"))) == 4
    assert dataset.rows.x.shape == (12, 1, 28, 28)
    assert dataset.rows.x.flatten()[:3].tolist() == list(tiny.contents["train-images-idx3-ubyte"][16:19])
    assert dataset.test_rows.y.tolist() == [0, 1, 2, 3]
    load("mnist")
    assert len(tiny.host.requests) == 4


def test_only_what_is_missing_is_downloaded(tiny: Any, bare: Path) -> None:
    cache = tiny.put(bare / "cache" / "ntkfl" / "mnist")
    (cache / "t10k-labels-idx1-ubyte.gz").unlink()
    load("mnist")
    assert tiny.host.requests == ["t10k-labels-idx1-ubyte.gz"]


def test_no_data_and_no_network_is_two_lines_and_quick(tiny: Any, bare: Path) -> None:
    tiny.host.statuses = [404]
    with pytest.raises(DataError) as caught:
        load("mnist")
    first, second = str(caught.value).split("\n")
    assert "mnist is not on this machine" in first
    assert str(bare / "system" / "mnist") in first
    assert "404" in first
    assert "`ntkfl data fetch mnist`" in second
    assert "NTKFL_DATA" in second


def test_a_folder_may_be_the_root_or_the_place_itself(tiny: Any, bare: Path) -> None:
    tiny.put(bare / "mine" / "mnist")
    assert load("mnist", bare / "mine").source == load("mnist", str(bare / "mine" / "mnist")).source
    with pytest.raises(DataError, match="elsewhere does not hold mnist\nget it: "):
        load("mnist", bare / "elsewhere")
    assert tiny.host.requests == []  # a folder that was named is not replaced by a download


def test_a_wrong_setting_is_not_passed_over(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NTKFL_DATA", str(bare / "typo"))
    with pytest.raises(DataError, match=r"NTKFL_DATA is .*typo.*no folder"):
        load("mnist")


@pytest.mark.usefixtures("bare")
def test_digits_are_always_there() -> None:
    dataset = load("digits")
    assert (len(dataset), len(dataset.test_rows.y), dataset.classes) == (1442, 355, 10)
    assert_normalised(dataset)


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
    root = os.environ.get("NTKFL_DATA")
    if not root or catalog.locate(name, root) is None:
        pytest.skip(f"{name} is not in $NTKFL_DATA")
    return load(name, root)


@pytest.mark.parametrize(
    ("name", "shape", "test_rows", "first_labels"),
    [
        ("fashion-mnist", (60000, 1, 28, 28), 10000, [9, 0, 0, 3, 0]),
        ("mnist", (60000, 1, 28, 28), 10000, [5, 0, 4, 1, 9]),
        ("cifar10", (50000, 3, 32, 32), 10000, [6, 9, 9, 4, 1]),
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
