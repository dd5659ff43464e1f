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
import os
import re
import sqlite3
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from ntkfl.atomic import write_atomically
from ntkfl.crypto.row_frames import SEED_BYTES, Announced, BatchKey
from ntkfl.errors import ConfigError, Refused
from ntkfl.services.announcement import Batch

_GENERATOR = SystemRandom()  # the operating system's
Database = sqlite3.Connection
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


@dataclass
class RunState:
    """What the database says of a run, beside rows and senders: the newest batch above all. "over": given up, or
    fetched and deleted.
    """

    run: str  # whose file it is
    terms: str | None = None  # SHA-256; they never change
    revoked: list[str] = field(default_factory=list)  # clients
    batch: Batch | None = None
    digest: str = ""  # SHA-256 of its announcement, hexadecimal
    stage: Literal["open", "released", "over"] = "over"
    released: int | None = None  # number of the newest release

    def check_terms(self, terms: str) -> None:
        """`Refused` unless the run began with these terms: what was promised to clients cannot change under way."""
        if self.terms != terms:
            raise Refused("other-terms", "this run began with other terms: give the new one a name of its own")

    def find(self, key: BatchKey) -> Batch:
        """The newest batch, if it is the one of this key; `Refused` otherwise."""
        if self.batch is None or self.batch.key < key:
            raise Refused("unknown-batch", f"no batch {tuple(key)} was opened")
        if self.batch.key > key:
            raise Refused("late", f"batch {tuple(key)} is over, and a newer one open")
        return self.batch

    def announced(self, key: BatchKey) -> Announced:
        """What rows of the newest batch answer."""
        return Announced(key, bytes.fromhex(self.digest))

    def check_announced(self, announced: Announced) -> None:
        """`Refused` unless this is what was announced under its key: a client that heard another must not answer it."""
        if announced != self.announced(announced.key):
            raise Refused("other-announcement", f"batch {tuple(announced.key)} was announced with other contents")


_STATE = TypeAdapter(RunState)


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
            with self._transaction() as (db, state):
                if state.run != run:
                    raise ConfigError(f"{path} is of another run: move it away")
                self._compare(db, state)
        except BaseException:
            self.close()  # and let go of the file's lock
            raise

    def close(self) -> None:
        """Let go of the file, which another process may then use."""
        with self._lock:
            self._db.close()

    def begin(self, terms: str) -> int:
        """Pin the run's terms (their SHA-256), which never change: the first round that was not announced yet."""
        with self._transaction() as (_, state):
            if state.terms is None:
                state.terms = terms
            state.check_terms(terms)
            return state.batch.key.round + 1 if state.batch else 1

    def open(self, batch: Batch, digest: bytes, terms: str | None = None, revoked: Collection[str] = ()) -> None:
        """Accept rows for the batch from now on, in answer to the announcement with this SHA-256. What is left of the
        batch before is deleted. Asking again for the same one is harmless.

        `terms`, where the run began with some, must be those. From the clients `revoked` by then nothing is taken.
        """
        key = batch.check().key
        with self._transaction() as (db, state):
            if terms is not None:
                state.check_terms(terms)
            if batch.min_clients < self._floor:
                raise Refused("below-floor", f"no batch here has fewer than {self._floor} clients")
            state.revoked = sorted(revoked)
            newest = state.batch
            if newest and newest.key == key:
                return state.check_announced(Announced(key, digest))
            if newest and newest.key > key:
                raise Refused("backwards", f"batch {tuple(key)} is older than one announced before")
            if newest:
                self._end(db, state, newest)
            if key.exchange == 0:
                db.execute("DROP TABLE IF EXISTS answered")
            elif not (newest and newest.key.round == key.round and _answers(db)):
                raise Refused("not-begun", f"the first exchange of round {key.round} was not released")
            for statement in _OPENED.split(";"):
                db.execute(statement)
            state.batch, state.digest, state.stage = batch, digest.hex(), "open"

    def submit(
        self, client: str, announced: Announced, rows: Sequence[bytes | memoryview], seed: bytes | None = None
    ) -> bool:
        """Take all of a client's rows, or `Refused`. On return they are on the disk. False where the client has sent
        before: the first submission counts.

        For a secure sum there is one row, the masked vector, and the `seed` of its mask: both are kept or neither. A
        batch takes the one kind or the other, so that no seed can end among rows that are released.
        """
        with self._transaction() as (db, state):
            batch = state.find(announced.key)
            if client in state.revoked:
                raise Refused("revoked", "this client is revoked")
            state.check_announced(announced)
            if state.stage != "open" or (self._logged and self._logged[0] == batch.key.number):
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
        with self._transaction() as (db, state):
            batch = state.find(key)
            if state.stage == "over":
                raise Refused("late", "this batch is over: it was given up, or released and deleted")
            if state.stage == "open":
                sent, needed = _sent(db), max(self._floor, batch.min_clients)
                if key.exchange:  # revoked ones too: the others' rows alone would point at theirs
                    needed = max(needed, len(_answers(db)))
                if sent < needed:
                    raise Refused("not-ready", f"clients that have sent rows: {sent}; release needs at least {needed}")
                self._permute(db, state, batch)
            masks, *rows = (row for (row,) in db.execute("SELECT row FROM released ORDER BY position"))
            return Released(state.announced(key), rows, masks)

    def discard(self, key: BatchKey) -> None:
        """Delete all of a batch, and take no more for it: the aggregator has its rows, or gives it up."""
        with self._transaction() as (db, state):
            self._end(db, state, state.find(key))

    def submission_limit(self) -> int:
        """Bytes of the largest submission that the newest batch allows, also to clients that are late."""
        with self._transaction() as (_, state):
            return state.batch.max_rows * state.batch.row_bytes if state.batch else 0

    # -- Inside a transaction

    def _permute(self, db: Database, state: RunState, batch: Batch) -> None:
        """Rows are copied inside the file in a random order; they do not pass through this process's memory."""
        logged = batch.key.number, _contents(db)
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
        masks = _sum_masks(db, state.announced(batch.key), batch.numbers) if batch.numbers else b""
        db.execute("INSERT INTO released VALUES (-1, ?)", (masks,))
        db.execute("DROP TABLE senders")
        db.execute("DROP TABLE pending")
        state.stage, state.released = "released", logged[0]
        if self._log and self._logged != logged:
            self._save(state)
            _write_log(self._log, *logged)  # last: what follows is the commit
            self._logged = logged

    def _end(self, db: Database, state: RunState, batch: Batch) -> None:
        """Delete a batch's senders, seeds, rows and masks, whatever its stage."""
        for table in ("senders", "pending", "released"):
            db.execute(f"DROP TABLE IF EXISTS {table}")
        if self._logged and self._logged[0] == batch.key.number:
            state.released = batch.key.number  # also where its release could not be committed
        state.stage = "over"

    def _compare(self, db: Database, state: RunState) -> None:
        """`ConfigError` where the database does not know of the newest release, or the log does not."""
        if self._log is None or (self._logged[0] if self._logged else None) == state.released:
            return
        batch = state.batch
        if batch and state.stage == "open" and self._logged == (batch.key.number, _contents(db)):
            return self._permute(db, state, batch)  # killed between the log's line and the commit
        raise ConfigError(_RESTORED)

    def _save(self, state: RunState) -> None:
        """Write the state, if anything of it changed: who only asks does not wait for the disk."""
        text = _STATE.dump_json(state).decode()
        self._db.execute("UPDATE facts SET value = ?1 WHERE name = 'state' AND value != ?1", (text,))

    @contextmanager
    def _transaction(self) -> Iterator[tuple[Database, RunState]]:
        """One at a time; written to the disk when the block ends, the state with it, and undone if it raises."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                state = _STATE.validate_json(_fact(self._db, "state"))
                yield self._db, state
                self._save(state)
                self._db.execute("COMMIT")
            except BaseException as error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if isinstance(error, _BROKEN):
                    raise Refused("storage", f"the shuffler's state cannot be used: {_line(error)}") from None
                raise


# -- Values in the database


def _fact(db: Database, name: str) -> Any:
    """The run's `state`, as JSON, or its `salt`."""
    return db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()[0]


def _sent(db: Database) -> int:
    """How many clients have sent to the open batch."""
    return int(db.execute("SELECT COUNT(*) FROM senders").fetchone()[0])


def _contents(db: Database) -> str:
    """SHA-256 (hexadecimal) of all rows that were sent, in whatever order: what the log keeps of a release."""
    digests = b"".join(digest for (digest,) in db.execute("SELECT digest FROM pending ORDER BY digest"))
    return hashlib.sha256(digests).hexdigest()


def _sum_masks(db: Database, announced: Announced, numbers: int) -> bytes:
    """The sum of the masks of all clients that have sent. A seed that is lost raises."""
    seeds = [seed for (seed,) in db.execute("SELECT seed FROM senders")]
    from ntkfl.crypto.masking import pack_words, sum_masks  # numpy comes with it, which rows do without

    return pack_words(sum_masks(seeds, announced, numbers))


# -- A round's clients: its first exchange is released with those that have answered, every later one with exactly the
#    same, or not at all. The aggregator can match a later row to an earlier one of the same sample (it can predict
#    losses), so a client that answered only one of the two would own the rows without a match. The clients of the
#    first exchange are kept as keyed hashes of their names until the next round begins.


def _answers(db: Database) -> set[bytes]:
    """Hashes of the clients that answered the round's first exchange; none before it was released."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'answered'").fetchone():
        return set()
    return {tag for (tag,) in db.execute("SELECT tag FROM answered")}


def _tag(db: Database, name: str) -> bytes:
    """A keyed hash of a client's name, 16 bytes: the same all through a run, and of no use in another file."""
    return hashlib.blake2b(name.encode(), key=_fact(db, "salt"), digest_size=16).digest()


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


def _connect(path: Path | None, run: str) -> Database:
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
        db.execute("INSERT OR IGNORE INTO facts VALUES ('state', ?)", (_STATE.dump_json(RunState(run)).decode(),))
        db.execute("COMMIT")
    except _BROKEN as error:
        why = f"maybe another process does: {_line(error)}"
        raise ConfigError(f"cannot use the shuffler's state {path}, {why}") from None
    return db
