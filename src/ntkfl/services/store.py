"""The state of the shuffler in one run: the batch that is asked for, and its release without senders.

A run has one batch at a time; opening the next deletes what is left of it. Until a batch is released, its file says
who has sent and in what order rows came: that is how a client is kept from sending twice, and how distinct clients are
counted. The release deletes both in the transaction that makes it.

What names a sender, and every row, lies in tables that are dropped whole: SQLite then overwrites all their pages with
zeros (`secure_delete`). Single records deleted from a table that lives on can leave copies in its pages. What the file
system or the disk keep of overwritten files is beyond this module.

A submission is one transaction and is accepted once it is committed: a process killed at any moment has lost nothing
that it acknowledged. A secure sum is a batch of one masked vector per client. The seeds of the masks come beside the
vectors; at the release the sum of the masks takes their place.

Beside the database stands a **release log**, the number and the SHA-256 of the newest release:

    batch number, 10 hexadecimal digits | space | SHA-256 of what was released | line feed

It is on the disk before the release is committed. So a database that was restored from an older copy does not know of
the release in the log, and a batch can be released again only with the very same rows: with one client more or less,
the difference of the two releases would be that client's.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from ntkfl.atomic import write_atomically
from ntkfl.crypto.row_frames import SEED_BYTES, Announced, BatchKey
from ntkfl.errors import ConfigError, Refused
from ntkfl.services.announcement import Batch

_GENERATOR = SystemRandom()  # the operating system's
_BROKEN = (sqlite3.Error, OSError, TypeError, ValueError)  # what comes of a damaged file, or a full disk
_LOG_LINE = re.compile(rb"([0-9a-f]{10}) ([0-9a-f]{64})\n")
_RESTORED = (
    "the shuffler's database and its release log disagree: one of them was restored from a copy, and would release a "
    "batch twice; delete the run's files and begin a new run"
)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
INSERT OR IGNORE INTO facts VALUES ('salt', randomblob(32))
"""
_OPENED = """
CREATE TABLE senders (client TEXT PRIMARY KEY, seed BLOB) WITHOUT ROWID;
CREATE TABLE pending (digest BLOB UNIQUE, row BLOB)
"""


@dataclass(frozen=True)
class Record:
    """The newest batch of a run as the database has it. "over": given up, or fetched and deleted."""

    batch: Batch
    digest: str  # SHA-256 of its announcement, hexadecimal
    state: Literal["open", "released", "over"] = "open"

    @property
    def announced(self) -> Announced:
        """What rows of the batch answer."""
        return Announced(self.batch.key, bytes.fromhex(self.digest))


_RECORD = TypeAdapter(Record)


class Released(NamedTuple):
    """Rows in a random order, for the announcement that they answer. `masks`: of a secure sum the sum of the clients'
    masks, 4 bytes a number; of rows nothing.
    """

    announced: Announced
    rows: list[bytes]
    masks: bytes


class BatchStore:
    """The batches of one run, in a file or (no `path`) in memory. Thread-safe; a file has one process at a time.

    `floor` is its operator's: the aggregator cannot ask for smaller anonymity sets. A file belongs to one `run`.
    `ConfigError` where the file cannot be used, or was restored from a copy.
    """

    def __init__(self, path: Path | None = None, floor: int = 2, random: Random = _GENERATOR, run: str = "") -> None:
        self._lock, self._floor, self._random = threading.Lock(), floor, random
        self._log = None if path is None else path.with_suffix(".released")
        if path is not None and self._log is not None and self._log.exists() and not path.exists():
            raise ConfigError(f"{self._log} has no database beside it: delete it, and never use this run's name again")
        self._db = _connect(path, run)
        try:
            self._logged = None if self._log is None else _read_log(self._log)
            with self._transaction() as db:
                self._compare(db)
        except BaseException:
            self.close()  # and let go of the file's lock
            raise

    def close(self) -> None:
        """Let go of the file, which another process may then use."""
        with self._lock:
            self._db.close()

    def begin(self, terms: str) -> int:
        """Pin the run's terms (their SHA-256), which never change: the first round that was not announced yet."""
        with self._transaction() as db:
            if _fact(db, "terms") is None:
                _keep(db, "terms", terms)
            _check_terms(db, terms)
            newest = _newest(db)
            return newest.batch.key.round + 1 if newest else 1

    def open(self, batch: Batch, digest: bytes, terms: str | None = None, revoked: Collection[str] = ()) -> None:
        """Accept rows for the batch from now on, in answer to the announcement with this SHA-256. What is left of the
        batch before is deleted. Asking again for the same one is harmless.

        `terms`, where the run began with some, must be those. From the clients `revoked` by then nothing is taken.
        """
        announced = Announced(batch.check().key, digest)
        with self._transaction() as db:
            if terms is not None:
                _check_terms(db, terms)
            if batch.min_clients < self._floor:
                raise Refused("below-floor", f"no batch here has fewer than {self._floor} clients")
            _keep(db, "revoked", json.dumps(sorted(revoked)))
            newest = _newest(db)
            if newest and newest.batch.key == batch.key:
                return _refuse_other(newest, announced)
            if newest and newest.batch.key > batch.key:
                raise Refused("backwards", f"batch {tuple(batch.key)} is older than one announced before")
            if newest:
                self._end(db, newest)
            if batch.key.exchange == 0:
                db.execute("DROP TABLE IF EXISTS answered")
            if batch.key.exchange and not (newest and newest.batch.key.round == batch.key.round and _answers(db)):
                raise Refused("not-begun", f"the first exchange of round {batch.key.round} was not released")
            for statement in _OPENED.split(";"):
                db.execute(statement)
            _put(db, Record(batch, announced.digest.hex()))

    def submit(
        self, client: str, announced: Announced, rows: Sequence[bytes | memoryview], seed: bytes | None = None
    ) -> bool:
        """Take all of a client's rows, or `Refused`. On return they are on the disk. False where the client has sent
        before: the first submission counts.

        For a secure sum there is one row, the masked vector, and the `seed` of its mask: both are kept or neither. A
        batch takes the one kind or the other, so that no seed can end among rows that are released.
        """
        with self._transaction() as db:
            record = self._find(db, announced.key)
            if client in json.loads(_fact(db, "revoked")):
                raise Refused("revoked", "this client is revoked")
            _refuse_other(record, announced)
            batch = record.batch
            if record.state != "open" or (self._logged and self._logged[0] == batch.key.number):
                raise Refused("late", "this batch was released already")
            if (batch.numbers > 0) != (seed is not None):
                raise Refused("other-kind", "one of batch and submission is of a secure sum, and the other of rows")
            if seed is not None and len(seed) != SEED_BYTES:
                raise Refused("malformed", f"the seed of a mask has {SEED_BYTES} bytes, got {len(seed)}")
            if db.execute("SELECT 1 FROM senders WHERE client = ?", (client,)).fetchone():
                return False
            if not (_tag(db, client) in _answers(db) if batch.key.exchange else _sent(db) < batch.clients):
                raise Refused("not-asked", "this batch asks other clients, and as many have answered")
            if len(rows) != batch.max_rows:  # more would weigh more, and a number of one's own would tell clients apart
                raise Refused("row-count", f"every client sends exactly {batch.max_rows} rows, got {len(rows)}")
            if any(len(row) != batch.row_bytes for row in rows):
                raise Refused("row-size", f"every sealed row must have {batch.row_bytes} bytes")
            values = ((hashlib.blake2b(row, digest_size=16).digest(), row) for row in rows)
            try:
                db.executemany("INSERT INTO pending VALUES (?, ?)", values)
            except sqlite3.IntegrityError:
                raise Refused("copied", "one of these rows is here already") from None
            db.execute("INSERT INTO senders VALUES (?, ?)", (client, seed))
            return True

    def release(self, key: BatchKey) -> Released:
        """The batch without its senders, who are not known from then on.

        At least `min_clients` must have sent; in a later exchange of a round, all clients of the first. Asked again
        it gives the same bytes in the same order, until `discard`.
        """
        with self._transaction() as db:
            record = self._find(db, key)
            if record.state == "over":
                raise Refused("late", "this batch is over: it was given up, or released and deleted")
            if record.state == "open":
                sent, needed = _sent(db), max(self._floor, record.batch.min_clients)
                if key.exchange:  # revoked ones too: the others' rows alone would point at theirs
                    needed = max(needed, len(_answers(db)))
                if sent < needed:
                    raise Refused("not-ready", f"{sent} clients have sent rows; release needs at least {needed}")
                self._permute(db, record)
            masks, *rows = (row for (row,) in db.execute("SELECT row FROM released ORDER BY position"))
            return Released(record.announced, rows, masks)

    def discard(self, key: BatchKey) -> None:
        """Delete all of a batch, and take no more for it: the aggregator has its rows, or gives it up."""
        with self._transaction() as db:
            self._end(db, self._find(db, key))

    def submission_limit(self) -> int:
        """Bytes of the largest submission that the newest batch allows, also to clients that are late."""
        with self._transaction() as db:
            newest = _newest(db)
            return newest.batch.max_rows * newest.batch.row_bytes if newest else 0

    # -- Inside a transaction

    def _find(self, db: sqlite3.Connection, key: BatchKey) -> Record:
        """The newest batch, if it is the one of this key; `Refused` otherwise."""
        newest = _newest(db)
        if newest is None or newest.batch.key < key:
            raise Refused("unknown-batch", f"no batch {tuple(key)} was opened")
        if newest.batch.key > key:
            raise Refused("late", f"batch {tuple(key)} is over, and a newer one open")
        return newest

    def _permute(self, db: sqlite3.Connection, record: Record) -> None:
        """Rows are copied inside the file in a random order; they do not pass through this process's memory."""
        batch, logged = record.batch, (record.batch.key.number, _contents(db))
        if self._logged and self._logged[0] == logged[0] and self._logged != logged:
            raise Refused("storage", f"batch {tuple(batch.key)} was released before, with other rows: discard it")
        order = [number for (number,) in db.execute("SELECT rowid FROM pending ORDER BY rowid")]
        self._random.shuffle(order)
        db.execute("CREATE TABLE released (position INTEGER PRIMARY KEY, row BLOB)")  # at -1 the sum of the masks
        db.executemany("INSERT INTO released SELECT ?, row FROM pending WHERE rowid = ?", enumerate(order))
        if batch.key.exchange == 0:
            tags = [(_tag(db, name),) for (name,) in db.execute("SELECT client FROM senders")]
            db.execute("CREATE TABLE answered (tag BLOB PRIMARY KEY) WITHOUT ROWID")
            db.executemany("INSERT INTO answered VALUES (?)", tags)
        masks = _sum_masks(db, record) if batch.numbers else b""
        db.execute("INSERT INTO released VALUES (-1, ?)", (masks,))
        db.execute("DROP TABLE senders")
        db.execute("DROP TABLE pending")
        _put(db, Record(batch, record.digest, "released"))
        _keep(db, "released", logged[0])
        if self._log and self._logged != logged:
            _write_log(self._log, *logged)  # last: what follows is the commit
            self._logged = logged

    def _end(self, db: sqlite3.Connection, record: Record) -> None:
        """Delete a batch's senders, seeds, rows and masks, whatever its state."""
        for table in ("senders", "pending", "released"):
            db.execute(f"DROP TABLE IF EXISTS {table}")
        if self._logged and self._logged[0] == record.batch.key.number:
            _keep(db, "released", record.batch.key.number)  # also where its release could not be committed
        _put(db, Record(record.batch, record.digest, "over"))

    def _compare(self, db: sqlite3.Connection) -> None:
        """`ConfigError` where the database does not know of the newest release, or the log does not."""
        if self._log is None or (self._logged[0] if self._logged else None) == _fact(db, "released"):
            return
        newest = _newest(db)
        if newest and newest.state == "open" and self._logged == (newest.batch.key.number, _contents(db)):
            return self._permute(db, newest)  # killed between the log's line and the commit
        raise ConfigError(_RESTORED)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One at a time; written to the disk when the block ends, undone if it raises."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except BaseException as error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if isinstance(error, _BROKEN):
                    raise Refused("storage", f"the shuffler's state cannot be used: {_line(error)}") from None
                raise


# -- Values in the database


def _fact(db: sqlite3.Connection, name: str) -> Any:
    """One of `run`, `salt`, `terms`, `revoked`, `batch`, and `released`, the number of the newest release; or None."""
    found = db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return found and found[0]


def _keep(db: sqlite3.Connection, name: str, value: bytes | str | int) -> None:
    db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


def _put(db: sqlite3.Connection, record: Record) -> None:
    _keep(db, "batch", _RECORD.dump_json(record).decode())


def _newest(db: sqlite3.Connection) -> Record | None:
    """The run's newest batch."""
    text = _fact(db, "batch")
    return None if text is None else _RECORD.validate_json(text)


def _sent(db: sqlite3.Connection) -> int:
    """How many clients have sent to the open batch."""
    return int(db.execute("SELECT COUNT(*) FROM senders").fetchone()[0])


def _contents(db: sqlite3.Connection) -> str:
    """SHA-256 (hexadecimal) of all rows that were sent, in whatever order: what the log keeps of a release."""
    digests = b"".join(digest for (digest,) in db.execute("SELECT digest FROM pending ORDER BY digest"))
    return hashlib.sha256(digests).hexdigest()


def _sum_masks(db: sqlite3.Connection, record: Record) -> bytes:
    """The sum of the masks of all clients that have sent. A seed that is lost raises."""
    seeds = [seed for (seed,) in db.execute("SELECT seed FROM senders")]
    from ntkfl.crypto.masking import pack_words, sum_masks  # numpy comes with it, which rows do without

    return pack_words(sum_masks(seeds, record.announced, record.batch.numbers))


# -- A round's clients: its first exchange is released with those that have answered, every later one with exactly the
#    same, or not at all. The aggregator can match a later row to an earlier one of the same sample (it can predict
#    losses), so a client that answered only one of the two would own the rows without a match. The clients of the
#    first exchange are kept as keyed hashes of their names until the next round begins.


def _answers(db: sqlite3.Connection) -> set[bytes]:
    """Hashes of the clients that answered the round's first exchange; none before it was released."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'answered'").fetchone():
        return set()
    return {tag for (tag,) in db.execute("SELECT tag FROM answered")}


def _tag(db: sqlite3.Connection, name: str) -> bytes:
    """A keyed hash of a client's name, 16 bytes: the same all through a run, and of no use in another file."""
    return hashlib.blake2b(name.encode(), key=_fact(db, "salt"), digest_size=16).digest()


def _check_terms(db: sqlite3.Connection, terms: str) -> None:
    """`Refused` unless the run began with these terms: what was promised to clients cannot change under way."""
    if _fact(db, "terms") != terms:
        raise Refused("other-terms", "this run began with other terms: give the new one a name of its own")


def _refuse_other(record: Record, announced: Announced) -> None:
    """`Refused` unless this is what was announced under its key: a client that heard another must not answer it."""
    if record.announced != announced:
        raise Refused("other-announcement", f"batch {tuple(announced.key)} was announced with other contents")


# -- Files


def _line(error: BaseException) -> str:
    """What an error says, which may quote a damaged file, on one line."""
    return f"{' '.join(str(error).split()):.300}"


def _read_log(path: Path) -> tuple[int, str] | None:
    """Number and SHA-256 of the newest release; None before the first."""
    try:
        found = _LOG_LINE.fullmatch(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot use {path}: {error.strerror}") from None
    if not found:
        raise ConfigError(f"{path} is damaged: what was released is not known; begin a new run")
    return int(found[1], 16), found[2].decode()


def _write_log(path: Path, number: int, contents: str) -> None:
    """On return the line is on the disk. `OSError` where it cannot be; then the old one is."""
    write_atomically(path, b"%010x %s\n" % (number, contents.encode()))
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _connect(path: Path | None, run: str) -> sqlite3.Connection:
    """The database, readable by its owner alone, in which nothing stays of what is deleted."""
    try:
        if path is not None:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            os.fchmod(handle, 0o600)
            os.close(handle)
        db = sqlite3.connect(path or ":memory:", timeout=2, isolation_level=None, check_same_thread=False)
        for pragma in (
            "journal_mode = TRUNCATE",  # first: a killed process may have left one
            "secure_delete = ON",
            "temp_store = MEMORY",
            "synchronous = FULL",
            "locking_mode = EXCLUSIVE",
        ):
            db.execute(f"PRAGMA {pragma}")
        db.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA.split(";"):
            db.execute(statement)
        if (owner := _fact(db, "run")) is None:
            _keep(db, "run", owner := run)
        db.execute("COMMIT")
    except _BROKEN as error:
        why = f"maybe another process does: {_line(error)}"
        raise ConfigError(f"cannot use the shuffler's state {path}, {why}") from None
    if owner != run:
        db.close()
        raise ConfigError(f"{path} is of another run: move it away")
    return db
