"""Downloads that can be cut at any moment: resumed where they stopped, checked, and only then given their name."""

from __future__ import annotations

import hashlib
import http.client
import os
import queue
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ntkfl.errors import DataError

if sys.platform != "win32":
    import fcntl

_CHUNK = 1 << 16
_LOG_S = 10.0  # between two lines of a log


@dataclass(frozen=True)
class Remote:
    """A published file: where it is, and the length and sha256 it must have."""

    url: str
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.url.rpartition("/")[2]


def download(
    remote: Remote,
    folder: Path,
    *,
    show: Callable[[int], object] = lambda done: None,
    timeout: float = 10.0,
    attempts: int = 4,
    pause: float = 1.0,
) -> Path:
    """Put the file into `folder` and return its path; nothing is done where it is already there.

    Bytes gather in NAME.part, which survives an interruption and is asked to be continued (Range). A broken connection
    is tried again `attempts` times in all. `show` is told how many bytes there are.
    """
    final = folder / remote.name
    part = folder / f"{remote.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone_in(folder):
            if final.exists():  # another process was faster
                return final
            for attempt in range(attempts):
                try:
                    _continue(remote, part, show, timeout)
                    break
                except (OSError, http.client.HTTPException) as error:
                    if attempt + 1 == attempts or not _may_pass(error):
                        raise
                    time.sleep(pause * 2**attempt)
            _check(remote, part)
            os.replace(part, final)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"{remote.url}: {_reason(error)}") from None
    return final


def _continue(remote: Remote, part: Path, show: Callable[[int], object], timeout: float) -> None:
    """Bring `part` to its full length with one request (two, where the server refuses to continue it)."""
    done = part.stat().st_size if part.exists() else 0
    if done == remote.bytes:
        return
    if done > remote.bytes:
        part.unlink()
        done = 0
    request = urllib.request.Request(remote.url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        answer = _open(request, timeout)
    except urllib.error.HTTPError as error:
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE or not done:
            raise
        part.unlink()
        return _continue(remote, part, show, timeout)
    with answer:
        if answer.status == http.client.PARTIAL_CONTENT:
            start, total = _content_range(answer.headers.get("Content-Range", ""))
            if start != done:
                part.unlink(missing_ok=True)
                raise ConnectionError(f"the server continued at byte {start} instead of {done}")
        else:  # the whole file, from a server that ignores Range
            done = 0
            total = remote.bytes if answer.length is None else answer.length
        if total != remote.bytes:
            part.unlink(missing_ok=True)
            raise DataError(f"{remote.url}: has {total} bytes there instead of {remote.bytes}, it is another file")
        with part.open("ab" if done else "wb") as file:
            show(done)
            # Never more than is missing: an endless answer must not fill the disk.
            while done < remote.bytes and (chunk := answer.read(min(_CHUNK, remote.bytes - done))):
                file.write(chunk)
                done += len(chunk)
                show(done)
    if done < remote.bytes:
        raise ConnectionError(f"the connection broke after {done} of {remote.bytes} bytes")


def _open(request: urllib.request.Request, timeout: float) -> http.client.HTTPResponse:
    """The answer to `request`, or an error, within `timeout` in all.

    The timeout of a socket does not do that: a name may have many addresses, each tried for so long, and looking up a
    name has no limit.
    """
    answers: queue.SimpleQueue[http.client.HTTPResponse | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(urllib.request.urlopen(request, timeout=timeout))
        except Exception as error:  # handed over to the caller below
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=timeout)
    except queue.Empty:
        raise urllib.error.URLError(f"no answer within {timeout:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _check(remote: Remote, part: Path) -> None:
    """Raise, and drop `part`, unless it has the published sha256."""
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    if found != remote.sha256:
        part.unlink()
        raise DataError(
            f"{remote.url}: sha256 is {found[:12]}… instead of {remote.sha256[:12]}…; what was downloaded was deleted"
        )


def _content_range(header: str) -> tuple[int, int]:
    """Start and total of `bytes START-END/TOTAL`; an unreadable header can match nothing."""
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", header.strip())
    return (int(match[1]), int(match[2])) if match else (-1, -1)


def _may_pass(error: Exception) -> bool:
    """Whether trying again may help: not where the server answered no, nor where there is no connection at all."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500
    return isinstance(error, ConnectionError | TimeoutError | http.client.HTTPException)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"cannot be reached ({error.reason})"
    return str(error) or type(error).__name__


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process downloads into `folder`: two runs started together must not write one .part."""
    if sys.platform == "win32":
        yield
        return
    with (folder / ".lock").open("a") as file:
        # Some network file systems have no locks: then the checksum finds what two runs made of one .part.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def progress(remotes: tuple[Remote, ...]) -> Iterator[Callable[[Remote, int], None]]:
    """On standard error a bar a file, with the time left, where that is a terminal, and a line now and then where it is
    a log; call what is yielded with a file and its bytes.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _Lines(console, sum(remote.bytes for remote in remotes))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bars:
        tasks = {remote: bars.add_task(remote.name, total=remote.bytes) for remote in remotes}
        yield lambda remote, done: bars.update(tasks[remote], completed=done)


class _Lines:
    """How far all files are, for a log."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total, self._done = console, total, dict[Remote, int]()
        self._began = self._said = time.monotonic()
        self._first = 0

    def __call__(self, remote: Remote, done: int) -> None:
        if remote not in self._done:
            self._first += done  # here already, from a download that was cut
        self._done[remote] = done
        now, here = time.monotonic(), sum(self._done.values())
        if now - self._said > _LOG_S and here > self._first:
            self._said = now
            left = (now - self._began) / (here - self._first) * (self._total - here)
            sizes = f"{here / 1e6:.0f} of {self._total / 1e6:.0f} MB"
            self._console.print(f"{remote.name}: {sizes}, {left:.0f} s left", soft_wrap=True)
