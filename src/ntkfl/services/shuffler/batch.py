"""A batch of rows: what is asked for, how far it is, and how it lies in the shuffler's file."""

from __future__ import annotations

import hashlib
import math
import re
import sqlite3
from dataclasses import dataclass
from typing import Any

from ntkfl.crypto.context import bind
from ntkfl.crypto.credentials import NAME_PATTERN
from ntkfl.crypto.mask_format import MOST_NUMBERS, WORD_BYTES
from ntkfl.crypto.row_frames import BatchKey
from ntkfl.errors import Refused

EVALUATION = 255  # the exchange number under which a round's model is evaluated
EVALUATORS = 254  # the exchange number of a secure sum of evaluators' counts: an anonymity set of its own
LEAST_EVALUATORS = 2  # of them in a sum: they are few, and hold data of their own
COLUMNS = "number, salt, state, max_rows, row_bytes, min_clients, deadline, clients, rows"


def least_of(key: BatchKey, min_clients: int) -> int:
    """Clients below which a batch is never released, where a federation's minimum is `min_clients`."""
    return LEAST_EVALUATORS if key.exchange == EVALUATORS else min_clients


@dataclass(frozen=True)
class Batch:
    """What the aggregator asks for: of which clients, how much of each, and for how long."""

    key: BatchKey
    cohort: tuple[str, ...]  # names of the clients asked
    max_rows: int  # of each client, exactly
    row_bytes: int  # of every sealed row, exactly
    min_clients: int  # distinct clients below which nothing is released, ever
    seconds: float | None = None  # until the deadline; None: wait for the whole cohort
    numbers: int = 0  # of a secure sum, those of each client's masked vector; 0: a batch of rows

    def check(self) -> Batch:
        """Itself; `Refused` if no batch can be made of it."""
        named = all(re.fullmatch(NAME_PATTERN, name) for name in self.cohort)
        timed = self.seconds is None or (math.isfinite(self.seconds) and self.seconds >= 0)
        sized = 1 <= self.max_rows < 1 << 32 and 1 <= self.row_bytes < 1 << 32
        if not (named and timed and sized and len(set(self.cohort)) == len(self.cohort)):
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
    """Of a batch, in numbers: "open", "ready", "released" or "cancelled"; `rows` only once released.

    `missing` names the clients whose answers a later exchange of a round still needs when its deadline has passed: the
    round has failed, and another cohort may do without them.
    """

    state: str
    clients: int
    rows: int | None
    seconds: float | None  # left until the deadline, while there is one to wait for
    missing: tuple[str, ...] = ()


CLOSED = {
    "released": ("late", "this batch was released already"),
    "cancelled": ("cancelled", "this batch was cancelled; wait for the next announcement"),
}


@dataclass(frozen=True)
class Record:
    """A batch as it is stored, and the tables that are its own."""

    number: int
    salt: bytes
    state: str
    max_rows: int
    row_bytes: int
    min_clients: int
    deadline: float | None
    clients: int
    rows: int | None
    numbers: int  # of a secure sum

    @classmethod
    def find(cls, db: sqlite3.Connection, key: BatchKey) -> Record:
        found: Any = db.execute(f"SELECT {COLUMNS} FROM batches WHERE number = ?", (key.number,)).fetchone()
        if found is None:
            raise Refused("unknown-batch", f"no batch {tuple(key)} was opened")
        summed: Any = db.execute("SELECT numbers FROM sums WHERE number = ?", (key.number,)).fetchone()
        values: tuple[Any, ...] = (*found, *(summed or (0,)))
        record = cls(*values)
        whole = (record.max_rows, record.row_bytes, record.min_clients, record.clients, record.numbers)
        sound = isinstance(record.salt, bytes) and all(isinstance(n, int) for n in whole)
        if record.state not in ("open", *CLOSED) or not sound:
            raise Refused("storage", f"the shuffler's record of batch {tuple(key)} is damaged")
        return record

    @property
    def key(self) -> BatchKey:
        return BatchKey.of(self.number)

    @property
    def cohort(self) -> str:
        return f"cohort_{self.number}"

    @property
    def pending(self) -> str:
        return f"pending_{self.number}"

    @property
    def seeds(self) -> str:
        return f"seeds_{self.number}"

    @property
    def released(self) -> str:
        return f"released_{self.number}"

    def absent(self, db: sqlite3.Connection) -> list[str]:
        """Of an open batch, those of its cohort that have not sent."""
        if self.state != "open":
            return []
        return [name for (name,) in db.execute(f"SELECT client FROM {self.cohort} WHERE sent IS NULL ORDER BY client")]

    def find_released(self, db: sqlite3.Connection) -> str:
        """The table of released rows; `Refused` if it is not there yet, or any more."""
        if self.state == "open":
            raise Refused("not-ready", "this batch is not released yet")
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (self.released,)).fetchone():
            raise Refused("forgotten", "this batch was released, and then deleted")
        return self.released

    def close(self, db: sqlite3.Connection, state: str, clients: int, rows: int | None) -> None:
        db.execute(f"DROP TABLE IF EXISTS {self.cohort}")
        db.execute(f"DROP TABLE IF EXISTS {self.pending}")
        db.execute(f"DROP TABLE IF EXISTS {self.seeds}")
        sql = "UPDATE batches SET state = ?, clients = ?, rows = ? WHERE number = ?"
        db.execute(sql, (state, clients, rows, self.number))
