"""What left a site, over all runs: an append-only file one JSON line per reply, written before it leaves.

Each line ends with a check, SHA-256 of the check before it and its own text, so that a line changed, left out or moved
is noticed. The check has no key: it finds damage and mistakes, not somebody who writes the whole file anew. A last line
without an end is of a process that died while writing: its reply was not sent, and it is cut off.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ntkfl.atomic import write_atomically
from ntkfl.errors import ConfigError, Refused
from ntkfl.options import Options
from ntkfl.safe_parse import parse_json

FILE, REPLIES = "ledger.jsonl", "replies"
YEAR, _WEEK = 365 * 86_400, 7 * 86_400


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class LedgerEntry(Options):
    """A run's terms as the site accepted them, or one reply. `epsilon` is what the run has spent so far, this reply
    included, at `delta`; None of replies without noise, for which no ε holds.
    """

    time: int = Field(ge=0)  # seconds since 1970
    what: Literal["terms", "reply"]
    run: str
    node: str = ""
    terms: str = ""  # digest of the run's terms
    method: str
    round: int = 0
    exchange: int = 0
    question: str = ""  # SHA-256, as is `reply`
    epsilon: float | None = Field(None, ge=0)
    delta: float | None = None
    bytes: int = 0
    reply: str = ""


def spent_in_year(entries: Sequence[LedgerEntry], today: float, but: str = "") -> float:
    """Σ over runs of their ε, by basic composition (δ adds up too); of all runs, or of those other than `but`.

    A run counts whole until 365 days after its last reply. Replies that seem to come from the future count.
    """
    live = {entry.run for entry in entries if entry.time > today - YEAR} - {but}
    spent = dict.fromkeys(live, 0.0)
    for entry in entries:
        if entry.run in live and entry.what == "reply":
            spent[entry.run] = max(spent[entry.run], entry.epsilon or 0.0)
    return sum(spent.values())


class Ledger:
    """The ledger in a folder, and beside it the last replies of each run. Read and write it inside `locked`."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.entries: list[LedgerEntry] = []
        self._check = ""
        self._file: FileIO

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the ledger against other processes and threads, its entries read anew.

        What the disk refuses, here or in the block, ends as one line: nothing was sent.
        """
        path = self.folder / FILE
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(path, "ab+", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.truncate(self.read())
                self._file = file
                yield
        except OSError as error:
            raise Refused("ledger", f"{path}: {error.strerror or error}; nothing was sent") from None

    def read(self) -> int:
        """Read the entries, without a lock and writing nothing; how many bytes they take in the file."""
        text = (self.folder / FILE).read_bytes()
        whole = text.rfind(b"\n") + 1
        self.entries, self._check = parse(text[:whole], str(self.folder / FILE))
        return whole

    def append(self, entry: LedgerEntry) -> None:
        """Add an entry: it is on the disk when this returns. Its time is never before that of the last one."""
        if self.entries:
            entry = entry.model_copy(update={"time": max(entry.time, self.entries[-1].time)})
        line, check = _line(entry, self._check)
        self._write(line)
        self.entries.append(entry)
        self._check = check

    def _write(self, line: bytes) -> None:
        size = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) != len(line):
                raise OSError("the disk is full")
            os.fsync(self._file.fileno())
            if size == 0:  # a new file: its name has to be on the disk too
                handle = os.open(self.folder, os.O_RDONLY)
                os.fsync(handle)
                os.close(handle)
        except OSError:
            self._file.truncate(size)
            raise

    def keep(self, run: str, name: str, reply: bytes, first: bool) -> None:
        """Keep a reply for a question that comes again. The `first` of a round replaces those of the round before, and
        those of runs that have been silent for a week.
        """
        place = self._place(run)
        for old in place.parent.glob("*") if first else ():
            if old == place or old.stat().st_mtime < time.time() - _WEEK:
                shutil.rmtree(old, ignore_errors=True)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(place / name, reply)

    def kept(self, run: str, name: str) -> bytes | None:
        path = self._place(run) / name
        return path.read_bytes() if path.is_file() else None

    def _place(self, run: str) -> Path:
        return self.folder / REPLIES / sha256(run.encode())[:32]  # any text names a run, but not a file


class MemoryLedger(Ledger):
    """A ledger in a mapping that lives as long as a run, such as a record of Flower's `context.state`."""

    def __init__(self, memory: MutableMapping[str, Any]) -> None:
        super().__init__("")
        self.memory = memory

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.entries, self._check = parse(self.memory.get(FILE, b""), "the ledger in memory")
        yield

    def _write(self, line: bytes) -> None:
        self.memory[FILE] = self.memory.get(FILE, b"") + line

    def keep(self, run: str, name: str, reply: bytes, first: bool) -> None:
        """Nothing: an equal reply is made again, from the client's own key, or refused."""

    def kept(self, run: str, name: str) -> None:
        """None."""


def parse(text: bytes, where: str) -> tuple[list[LedgerEntry], str]:
    """The entries in whole lines, and the last check; `Refused` with the first line that is not as it was written."""
    entries, check = list[LedgerEntry](), ""
    for number, line in enumerate(text.split(b"\n")[:-1], 1):
        try:
            values = parse_json(line.decode())
            entry = LedgerEntry(**{name: value for name, value in values.items() if name != "check"})
            again, check = _line(entry, check)
            if again != line + b"\n":
                raise ValueError
        except (ValueError, TypeError, AttributeError, ConfigError):
            raise Refused(
                "ledger", f"{where}: line {number} is damaged, and nothing is sent until it is mended"
            ) from None
        entries.append(entry)
    return entries, check


def _line(entry: LedgerEntry, before: str) -> tuple[bytes, str]:
    """The entry as it is written, with its check; and the check."""
    body = json.dumps(entry.model_dump(exclude_defaults=True), ensure_ascii=False, allow_nan=False)
    check = sha256((before + body).encode())[:32]
    return f'{body[:-1]}, "check": "{check}"}}\n'.encode(), check
