"""A batch of rows: what is asked for, how far it is, and how it lies in the shuffler's file."""

from __future__ import annotations

import hashlib
import re
import sqlite3
from dataclasses import dataclass
from typing import Any

from ntkfl.crypto.context import bind
from ntkfl.crypto.credentials import NAME_PATTERN
from ntkfl.crypto.mask_format import MOST_NUMBERS, WORD_BYTES
from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.errors import Refused

_COLUMNS = "number, digest, state, max_rows, row_bytes, min_clients, clients, rows, numbers"


@dataclass(frozen=True)
class Batch:
    """What the aggregator asks for: of which clients, and how much of each."""

    key: BatchKey
    cohort: tuple[str, ...]  # names of the clients asked
    max_rows: int  # of each client, exactly
    row_bytes: int  # of every sealed row, exactly
    min_clients: int  # distinct clients below which nothing is released, ever
    numbers: int = 0  # of a secure sum, those of each client's masked vector; 0: a batch of rows

    def check(self) -> Batch:
        """Itself; `Refused` if no batch can be made of it."""
        named = all(re.fullmatch(NAME_PATTERN, name) for name in self.cohort)
        sized = 1 <= self.max_rows < 1 << 32 and 1 <= self.row_bytes < 1 << 32
        if not (named and sized and len(set(self.cohort)) == len(self.cohort)):
            raise Refused("terms", "a batch asks distinct clients, for at least one row of at least one byte")
        if self.numbers and not (
            self.max_rows == 1 and 1 <= self.numbers <= MOST_NUMBERS and self.row_bytes >= WORD_BYTES * self.numbers
        ):
            raise Refused("terms", f"a secure sum asks each client for one row, of 1 to {MOST_NUMBERS} numbers")
        if self.min_clients > len(self.cohort):
            raise Refused("terms", f"{len(self.cohort)} clients can never be {self.min_clients} distinct ones")
        self.key.check()
        return self

    def cohort_digest(self, salt: bytes = b"") -> bytes:
        """What tells two cohorts apart where their names are not kept; in whatever order they are named."""
        return hashlib.blake2b(bind("ntkfl cohort v2", *sorted(self.cohort)), key=salt, digest_size=32).digest()


@dataclass(frozen=True)
class Status:
    """Of a batch, in numbers: "open", "ready", "released" or "cancelled"; `rows` only once released. While a batch is
    open the aggregator may count clients, never rows: the difference of two counts would be one client's share.
    """

    state: str
    clients: int
    rows: int | None = None


CLOSED = {
    "released": ("late", "this batch was released already"),
    "cancelled": ("cancelled", "this batch was cancelled; wait for the next question"),
}


@dataclass(frozen=True)
class Record:
    """A batch as it is stored, and the tables that are its own."""

    number: int
    digest: bytes  # of its announcement
    state: str
    max_rows: int
    row_bytes: int
    min_clients: int
    clients: int
    rows: int | None
    numbers: int

    @classmethod
    def find(cls, db: sqlite3.Connection, key: BatchKey) -> Record:
        found: Any = db.execute(f"SELECT {_COLUMNS} FROM batches WHERE number = ?", (key.number,)).fetchone()
        if found is None:
            raise Refused("unknown-batch", f"no batch {tuple(key)} was opened")
        record = cls(*found)
        whole = (record.max_rows, record.row_bytes, record.min_clients, record.clients, record.numbers)
        sound = isinstance(record.digest, bytes) and all(isinstance(n, int) for n in whole)
        if record.state not in ("open", *CLOSED) or not sound:
            raise Refused("storage", f"the shuffler's record of batch {tuple(key)} is damaged")
        return record

    @staticmethod
    def create(db: sqlite3.Connection, batch: Batch, announced: Announced) -> Record:
        sizes = (batch.max_rows, batch.row_bytes, batch.min_clients)
        values = (batch.key.number, announced.check().digest, "open", *sizes, 0, None, batch.numbers)
        db.execute(f"INSERT INTO batches ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        made = Record(*values)
        db.execute(f"CREATE TABLE {made.cohort} (client TEXT PRIMARY KEY, sent INTEGER, seed BLOB) WITHOUT ROWID")
        db.execute(f"CREATE TABLE {made.pending} (client TEXT, digest BLOB UNIQUE, row BLOB)")
        return made

    @property
    def key(self) -> BatchKey:
        return BatchKey.of(self.number)

    @property
    def announced(self) -> Announced:
        return Announced(self.key, self.digest)

    @property
    def cohort(self) -> str:
        """Table of the clients asked, with the rows that each has sent, and of a secure sum the seed of its mask."""
        return f"cohort_{self.number}"

    @property
    def pending(self) -> str:
        """Table of rows with their senders, while the batch is open."""
        return f"pending_{self.number}"

    @property
    def released(self) -> str:
        """Table of rows without their senders, permuted."""
        return f"released_{self.number}"

    def find_released(self, db: sqlite3.Connection) -> str:
        """The table of released rows; `Refused` if it is not there yet, or any more."""
        if self.state == "open":
            raise Refused("not-ready", "this batch is not released yet")
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (self.released,)).fetchone():
            raise Refused("forgotten", "this batch was released, and then deleted")
        return self.released

    def contents(self, db: sqlite3.Connection) -> bytes:
        """SHA-256 of all rows that were sent, in whatever order: what `ReleaseLog` keeps of a release."""
        digests = [digest for (digest,) in db.execute(f"SELECT digest FROM {self.pending} ORDER BY digest")]
        if not all(isinstance(digest, bytes) for digest in digests):
            raise Refused("storage", f"the shuffler's rows of batch {tuple(self.key)} are damaged")
        return hashlib.sha256(b"".join(digests)).digest()

    def close(self, db: sqlite3.Connection, state: str, clients: int, rows: int | None) -> None:
        db.execute(f"DROP TABLE IF EXISTS {self.cohort}")
        db.execute(f"DROP TABLE IF EXISTS {self.pending}")
        sql = "UPDATE batches SET state = ?, clients = ?, rows = ? WHERE number = ?"
        db.execute(sql, (state, clients, rows, self.number))
