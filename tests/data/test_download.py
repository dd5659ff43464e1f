"""Downloads against a real server that cuts, ignores, refuses and lies."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ntkfl.data.download import Remote, download, progress
from ntkfl.errors import DataError

BODY = np.random.default_rng(0).integers(0, 256, 200_000, np.uint8).tobytes()
get: Callable[..., Path] = partial(download, timeout=2.0, pause=0.0)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_a_file_is_downloaded_once(host: Any, tmp_path: Path) -> None:
    remote = host.publish("a.gz", BODY)
    seen: list[int] = []
    path = get(remote, tmp_path / "new" / "folder", show=seen.append)
    assert path.read_bytes() == BODY
    assert files(path.parent) == ["a.gz"]
    assert seen == sorted(seen)
    assert seen[-1] == len(BODY)
    get(remote, path.parent)
    assert host.asked == [None]


def test_a_cut_connection_is_continued_where_it_broke(host: Any, tmp_path: Path) -> None:
    host.cuts = [70_000, 1]
    path = get(host.publish("a.gz", BODY), tmp_path)
    assert host.asked == [None, "bytes=70000-", "bytes=70001-"]
    assert path.read_bytes() == BODY


def test_an_interrupted_download_has_no_name_yet_and_is_resumed(host: Any, tmp_path: Path) -> None:
    remote = host.publish("a.gz", BODY)
    host.cuts = [70_000]
    with pytest.raises(DataError, match="the connection broke after 70000 of 200000 bytes"):
        get(remote, tmp_path, attempts=1)
    assert files(tmp_path) == ["a.gz.part"]
    assert (tmp_path / "a.gz.part").read_bytes() == BODY[:70_000]
    assert get(remote, tmp_path).read_bytes() == BODY
    assert host.asked == [None, "bytes=70000-"]
    assert files(tmp_path) == ["a.gz"]


def test_the_user_may_interrupt_at_any_time(host: Any, tmp_path: Path) -> None:
    def stop(done: int) -> None:
        if done > 50_000:
            raise KeyboardInterrupt

    remote = host.publish("a.gz", BODY)
    with pytest.raises(KeyboardInterrupt):
        get(remote, tmp_path, show=stop)
    assert files(tmp_path) == ["a.gz.part"]
    part = (tmp_path / "a.gz.part").read_bytes()
    assert len(part) > 50_000
    assert BODY.startswith(part)
    assert get(remote, tmp_path).read_bytes() == BODY
    assert host.asked == [None, f"bytes={len(part)}-"]


def test_a_server_without_ranges_sends_the_whole_file_anew(host: Any, tmp_path: Path) -> None:
    host.ranges = False
    (tmp_path / "a.gz.part").write_bytes(BODY[:70_000])
    assert get(host.publish("a.gz", BODY), tmp_path).read_bytes() == BODY
    assert host.asked == ["bytes=70000-"]


def test_a_range_that_is_refused_starts_over(host: Any, tmp_path: Path) -> None:
    host.statuses = [416]
    (tmp_path / "a.gz.part").write_bytes(BODY[:70_000])
    assert get(host.publish("a.gz", BODY), tmp_path).read_bytes() == BODY
    assert host.asked == ["bytes=70000-", None]


@pytest.mark.parametrize("header", ["bytes 0-199999/200000", "nonsense", "bytes 70000-199999/*"])
def test_a_wrong_continuation_starts_over(host: Any, tmp_path: Path, header: str) -> None:
    host.range_header = header
    (tmp_path / "a.gz.part").write_bytes(BODY[:70_000])
    assert get(host.publish("a.gz", BODY), tmp_path).read_bytes() == BODY
    assert host.asked == ["bytes=70000-", None]


def test_a_part_that_is_too_long_starts_over(host: Any, tmp_path: Path) -> None:
    (tmp_path / "a.gz.part").write_bytes(BODY + b"x")
    assert get(host.publish("a.gz", BODY), tmp_path).read_bytes() == BODY
    assert host.asked == [None]


def test_a_part_that_is_whole_is_only_checked(host: Any, tmp_path: Path) -> None:
    (tmp_path / "a.gz.part").write_bytes(BODY)
    assert get(host.publish("a.gz", BODY), tmp_path).read_bytes() == BODY
    assert host.asked == []


@pytest.mark.parametrize("have", [0, 70_000])
def test_another_length_is_another_file(host: Any, tmp_path: Path, have: int) -> None:
    remote = host.publish("a.gz", BODY)
    host.publish("a.gz", BODY + b"more")
    if have:
        (tmp_path / "a.gz.part").write_bytes(BODY[:have])
    with pytest.raises(DataError, match="has 200004 bytes there instead of 200000"):
        get(remote, tmp_path)
    assert files(tmp_path) == []
    assert len(host.asked) == 1


def test_a_wrong_checksum_deletes_what_was_downloaded(host: Any, tmp_path: Path) -> None:
    remote = host.publish("a.gz", BODY)
    host.publish("a.gz", BODY[:-1] + bytes([BODY[-1] ^ 1]))
    with pytest.raises(DataError, match=r"sha256 is .* was deleted"):
        get(remote, tmp_path)
    assert files(tmp_path) == []


def test_a_damaged_part_costs_one_attempt_and_no_more(host: Any, tmp_path: Path) -> None:
    remote = host.publish("a.gz", BODY)
    (tmp_path / "a.gz.part").write_bytes(bytes(70_000))
    with pytest.raises(DataError, match="was deleted"):
        get(remote, tmp_path)
    assert get(remote, tmp_path).read_bytes() == BODY


def test_an_answer_without_end_is_not_followed(host: Any, tmp_path: Path) -> None:
    remote = host.publish("a.gz", BODY)
    host.lengthless = True
    host.publish("a.gz", bytes(5_000_000))
    with pytest.raises(DataError, match="was deleted"):
        get(remote, tmp_path)


def test_a_refusal_is_final_and_a_failure_is_not(host: Any, tmp_path: Path) -> None:
    remote = host.publish("a.gz", BODY)
    host.statuses = [404]
    with pytest.raises(DataError, match="the server answered 404 Not Found") as caught:
        get(remote, tmp_path)
    assert "\n" not in str(caught.value)
    assert len(host.asked) == 1
    host.statuses = [503, 500]
    assert get(remote, tmp_path).read_bytes() == BODY
    assert len(host.asked) == 4


def test_two_at_once_download_once(host: Any, tmp_path: Path) -> None:
    remote = host.publish("a.gz", BODY)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(get(remote, tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert [path.read_bytes() == BODY for path in found] == [True] * 4
    assert host.asked == [None]


def test_nobody_there_fails_at_once(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        remote = Remote(f"http://127.0.0.1:{free.getsockname()[1]}/a.gz", 3, "0" * 64)
        start = time.monotonic()
        with pytest.raises(DataError, match="cannot be reached"):
            download(remote, tmp_path)
        assert time.monotonic() - start < 2
    assert files(tmp_path) == []


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        remote = Remote(f"http://127.0.0.1:{silent.getsockname()[1]}/a.gz", 3, "0" * 64)
        start = time.monotonic()
        with pytest.raises(DataError, match=r"no answer within|timed out"):
            get(remote, tmp_path, timeout=0.2, attempts=1)
        assert time.monotonic() - start < 2


def test_a_name_that_cannot_be_looked_up_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    woken = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: woken.wait(10) and [])
    start = time.monotonic()
    with pytest.raises(DataError, match=r"no answer within 0\.2 s"):
        get(Remote("http://nowhere.invalid/a.gz", 3, "0" * 64), tmp_path, timeout=0.2)
    assert time.monotonic() - start < 2
    woken.set()


def test_a_folder_that_cannot_be_made_is_an_error(host: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"a\.gz: .*file"):
        get(host.publish("a.gz", BODY), tmp_path / "file" / "folder")


def test_no_bar_is_drawn_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    remote = Remote("http://127.0.0.1/a.gz", 100, "0" * 64)
    with progress((remote,)) as show:
        show(remote, 50)
    assert capfd.readouterr() == ("", "")
