"""A batch of rows: what is asked for, how far it is, and how it lies in the shuffler's file."""

from __future__ import annotations

import hashlib
import sqlite3
from dataclasses import astuple, dataclass
from typing import Any

from ntkfl.crypto.row_frames import MOST_NUMBERS, WORD_BYTES, Announced, BatchKey
from ntkfl.errors import Refused

_COLUMNS = "number, digest, state, asked, max_rows, row_bytes, min_clients, clients, rows, numbers"


@dataclass(frozen=True)
class Batch:
    """What the aggregator asks for: of how many clients, and how much of each.

    It names no client. Whoever is enrolled may answer, once; who hears the question is decided where it is sent.
    """

    key: BatchKey
    clients: int  # asked; one more is refused, so that their secure sum cannot overflow
    max_rows: int  # of each client, exactly
    row_bytes: int  # of every sealed row, exactly
    min_clients: int  # distinct clients below which nothing is released, ever
    numbers: int = 0  # of a secure sum, those of each client's masked vector; 0: a batch of rows

    def check(self) -> Batch:
        """Itself; `Refused` if no batch can be made of it."""
        if not (1 <= self.max_rows < 1 << 32 and 1 <= self.row_bytes < 1 << 32 and self.clients < 1 << 32):
            raise Refused("terms", "a batch asks for at least one row of at least one byte")
        if self.numbers and not (
            self.max_rows == 1 and 1 <= self.numbers <= MOST_NUMBERS and self.row_bytes >= WORD_BYTES * self.numbers
        ):
            raise Refused("terms", f"a secure sum asks each client for one row, of 1 to {MOST_NUMBERS} numbers")
        if self.min_clients > self.clients:
            raise Refused("terms", f"{self.clients} clients can never be {self.min_clients} distinct ones")
        self.key.check()
        return self


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

    number: int  # of its key
    digest: bytes  # of its announcement
    state: str
    asked: int
    max_rows: int
    row_bytes: int
    min_clients: int
    clients: int
    rows: int | None
    numbers: int

    @classmethod
    def find(cls, db: sqlite3.Connection, key: BatchKey) -> Record:
        """The batch of a key; `Refused` if there is none, or the disk changed it."""
        found: Any = db.execute(f"SELECT {_COLUMNS} FROM batches WHERE number = ?", (key.number,)).fetchone()
        if found is None:
            raise Refused("unknown-batch", f"no batch {tuple(key)} was opened")
        record = cls(*found)
        whole = (*found[3:8], record.numbers)
        sound = isinstance(record.digest, bytes) and all(isinstance(n, int) for n in whole)
        if record.state not in ("open", *CLOSED) or not sound:
            raise Refused("storage", f"the shuffler's record of batch {tuple(key)} is damaged")
        return record

    @staticmethod
    def create(db: sqlite3.Connection, batch: Batch, digest: bytes) -> None:
        """An open batch without rows, and its tables."""
        sizes = (batch.clients, batch.max_rows, batch.row_bytes, batch.min_clients)
        made = Record(batch.key.number, digest, "open", *sizes, clients=0, rows=None, numbers=batch.numbers)
        db.execute(f"INSERT INTO batches ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", astuple(made))
        db.execute(f"CREATE TABLE {made.senders} (client TEXT PRIMARY KEY, seed BLOB) WITHOUT ROWID")
        db.execute(f"CREATE TABLE {made.pending} (digest BLOB UNIQUE, row BLOB)")

    @property
    def key(self) -> BatchKey:
        return BatchKey.of(self.number)

    @property
    def announced(self) -> Announced:
        return Announced(self.key, self.digest)

    @property
    def senders(self) -> str:
        """Table of the clients that have sent, while the batch is open; of a secure sum with their seeds."""
        return f"senders_{self.number}"

    @property
    def pending(self) -> str:
        """Table of rows in the order in which they came, while the batch is open."""
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
        """Released or cancelled: who has sent, and in what order rows came, is deleted."""
        db.execute(f"DROP TABLE IF EXISTS {self.senders}")
        db.execute(f"DROP TABLE IF EXISTS {self.pending}")
        sql = "UPDATE batches SET state = ?, clients = ?, rows = ? WHERE number = ?"
        db.execute(sql, (state, clients, rows, self.number))
