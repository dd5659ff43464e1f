"""Downloads against a real server that cuts, refuses and lies."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ntkfl.data.download import Remote, download
from ntkfl.errors import DataError

BODY = np.random.default_rng(0).integers(0, 256, 200_000, np.uint8).tobytes()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_downloaded_once(host: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, remotes = tmp_path / "new" / "folder", [host.publish("a.gz", BODY), host.publish("b.gz", BODY[:100])]
    download(remotes, folder)
    assert files(folder) == ["a.gz", "b.gz"]
    assert (folder / "a.gz").read_bytes() == BODY
    assert capfd.readouterr() == ("", "")  # no bar where there is no terminal
    (folder / "b.gz").unlink()
    download(remotes, folder)
    assert host.requests == ["a.gz", "b.gz", "b.gz"]


def test_what_is_cut_or_another_file_gets_no_name(host: Any, tmp_path: Path) -> None:
    remote = host.publish("a.gz", BODY)
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


def test_a_refusal_is_one_line(host: Any, tmp_path: Path) -> None:
    remote = host.publish("a.gz", BODY)
    host.statuses = [404]
    with pytest.raises(DataError, match="404") as caught:
        download([remote], tmp_path)
    assert "\n" not in str(caught.value)


def test_nobody_there_fails_at_once(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        start = time.monotonic()
        with pytest.raises(DataError, match="refused"):
            download([Remote(f"http://127.0.0.1:{free.getsockname()[1]}/a.gz", 3, "0" * 64)], tmp_path)
        assert time.monotonic() - start < 2


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        start = time.monotonic()
        with pytest.raises(DataError, match="timed out"):
            download([Remote(f"http://127.0.0.1:{silent.getsockname()[1]}/a.gz", 3, "0" * 64)], tmp_path, timeout=0.2)
        assert time.monotonic() - start < 2


def test_a_folder_that_cannot_be_made_is_an_error(host: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"a\.gz: .*file"):
        download([host.publish("a.gz", BODY)], tmp_path / "file" / "folder")
