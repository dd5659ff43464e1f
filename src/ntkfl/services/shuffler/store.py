"""The shuffler: collects one batch of sealed rows per exchange, and releases it permuted, without their senders.

While a batch is open, the clients that have sent are known, and the order in which rows came: that is how a client is
kept from sending twice and how distinct ones are counted. At the release both are deleted in the same transaction.
Everything that names a sender, and every row, lies in tables of its own batch, which are dropped whole: SQLite then
overwrites all their pages with zeros (`secure_delete`). Single records deleted from a table that lives on can leave
copies behind in its pages. What the file system or the disk keep of overwritten and truncated files is beyond this
module.

A secure sum is a batch of one masked vector per client. The seeds of the masks come beside the vectors; at the release
the sum of the masks takes their place.

A submission is one transaction and is accepted once it is committed, so a process killed at any moment has lost
nothing it said it had.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random, SystemRandom

from ntkfl.crypto.row_frames import SEED_BYTES, WORD_BYTES, Announced, BatchKey
from ntkfl.errors import ConfigError, Refused
from ntkfl.services.peers import PROTOCOL
from ntkfl.services.shuffler.batch import CLOSED, Batch, Record, Status
from ntkfl.services.shuffler.release_log import ReleaseLog

_GENERATOR = SystemRandom()  # the operating system's
_BROKEN = (sqlite3.Error, UnicodeDecodeError)  # of a damaged file: SQLite quotes it in what it says
_RESTORED = (
    "the shuffler's database and its log of releases disagree: one of them was restored from a copy, and would release "
    "a batch twice; delete the run's files and begin a new run"
)
_SCHEMA = f"""
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE revoked (client TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE batches (number INTEGER PRIMARY KEY, digest BLOB, state TEXT, asked INTEGER, max_rows INTEGER,
  row_bytes INTEGER, min_clients INTEGER, clients INTEGER, rows INTEGER, numbers INTEGER, masks BLOB);
INSERT INTO facts VALUES ('salt', randomblob(32));
PRAGMA user_version = {PROTOCOL};
"""


class BatchStore:
    """The batches of one run, in a file or (no `path`) in memory. Thread-safe; a file has one process at a time.

    `floor` is its operator's: the aggregator cannot ask for smaller anonymity sets. A file belongs to one `run`.
    """

    def __init__(self, path: Path | None = None, floor: int = 2, random: Random = _GENERATOR, run: str = "") -> None:
        self._lock, self._floor, self._random = threading.Lock(), floor, random
        self._db = _connect(path, run)
        self._log: ReleaseLog | None = None
        try:
            if path is not None:
                self._log = ReleaseLog(path.with_suffix(".released"))
                self._compare(self._log)
        except BaseException:
            self.close()  # and let go of the file's lock
            raise

    def close(self) -> None:
        with self._lock:
            self._db.close()
            if self._log is not None:
                self._log.close()

    def begin(self, terms: str) -> BatchKey | None:
        """Pin the run's terms (their SHA-256), which never change: the newest exchange that was announced."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO facts VALUES ('terms', ?)", (terms,))
            _check_terms(db, terms)
            newest = db.execute("SELECT MAX(number) FROM batches").fetchone()[0]
            return None if newest is None else BatchKey.of(newest)

    # -- One exchange

    def open(self, batch: Batch, digest: bytes, terms: str | None = None, revoked: Collection[str] = ()) -> None:
        """Accept rows for the batch from now on, in answer to the announcement with this SHA-256. Asking again for the
        same one is harmless.

        `terms`, where the run began with some, must be those. From the clients `revoked` by then nothing is taken.
        """
        number = batch.check().key.number
        with self._transaction() as db:
            if terms is not None:
                _check_terms(db, terms)
            if batch.min_clients < self._floor:
                raise Refused("below-floor", f"no batch here has fewer than {self._floor} clients")
            db.execute("DELETE FROM revoked")
            db.executemany("INSERT INTO revoked VALUES (?)", ((name,) for name in revoked))
            if db.execute("SELECT 1 FROM batches WHERE number = ?", (number,)).fetchone():
                return _refuse_other(Record.find(db, batch.key), Announced(batch.key, digest))
            if db.execute("SELECT 1 FROM batches WHERE number > ?", (number,)).fetchone():
                raise Refused("backwards", f"batch {tuple(batch.key)} is older than one announced before")
            _begin_exchange(db, batch.key)
            Record.create(db, batch, Announced(batch.key, digest).check().digest)

    def submit(
        self, client: str, announced: Announced, rows: Sequence[bytes | memoryview], seed: bytes | None = None
    ) -> None:
        """Take all of a client's rows, once, or `Refused`. On return they are on the disk.

        For a secure sum there is one row, the masked vector, and the `seed` of its mask: both are kept or neither. A
        batch takes the one kind or the other, so that no seed can end among rows that are released.
        """
        with self._transaction() as db:
            if db.execute("SELECT 1 FROM revoked WHERE client = ?", (client,)).fetchone():
                raise Refused("revoked", "this client is revoked")
            batch = Record.find(db, announced.key)
            _refuse_other(batch, announced)
            if batch.state != "open":
                raise Refused(*CLOSED[batch.state])
            if self._log and batch.number in self._log.released:  # its release could not be committed
                raise Refused(*CLOSED["released"])
            _check_kind(batch, seed)
            if db.execute(f"SELECT 1 FROM {batch.senders} WHERE client = ?", (client,)).fetchone():
                raise Refused("replayed", "this client's rows of this batch are here already")
            if not _may_answer(db, batch, client):
                raise Refused("not-asked", "this batch asks other clients, and as many have answered")
            if len(rows) != batch.max_rows:  # more would weigh more, and a number of one's own would tell clients apart
                raise Refused("row-count", f"every client sends exactly {batch.max_rows} rows, got {len(rows)}")
            if any(len(row) != batch.row_bytes for row in rows):
                raise Refused("row-size", f"every sealed row must have {batch.row_bytes} bytes")
            values = ((hashlib.blake2b(row, digest_size=16).digest(), row) for row in rows)
            try:
                db.executemany(f"INSERT INTO {batch.pending} VALUES (?, ?)", values)
            except sqlite3.IntegrityError:
                raise Refused("copied", "one of these rows is here already") from None
            db.execute(f"INSERT INTO {batch.senders} VALUES (?, ?)", (client, seed))

    def status(self, key: BatchKey) -> Status:
        """A batch is ready when at least `min_clients` have sent; in a later exchange of a round, only when all clients
        of the first have.
        """
        with self._transaction() as db:
            return _status(db, Record.find(db, key))

    def release(self, key: BatchKey) -> list[bytes]:
        """The rows of a ready batch, permuted; from then on their senders are not known.

        Asked again it gives the same rows in the same order, until `forget`.
        """
        return self.released(key, 0, self.permute(key).rows or 0)

    def permute(self, key: BatchKey) -> Record:
        """Permute a ready batch and delete its senders: what is left of it. Harmless where that is done."""
        with self._transaction() as db:
            batch = Record.find(db, key)
            status = _status(db, batch)
            if status.state == "cancelled":
                raise Refused(*CLOSED["cancelled"])
            if status.state == "open":
                need = f"at least {batch.min_clients}, and in a later exchange all of the first"
                raise Refused("not-ready", f"{status.clients} clients have sent rows; release needs {need}")
            if status.state == "ready":
                self._permute(db, batch)
            batch = Record.find(db, key)
            batch.find_released(db)
            return batch

    def released(self, key: BatchKey, first: int, count: int) -> list[bytes]:
        """`count` rows of a released batch, from the permutation's position `first` on; `Refused` before and after."""
        with self._transaction() as db:
            table = Record.find(db, key).find_released(db)
            rows = db.execute(f"SELECT row FROM {table} WHERE position >= ? ORDER BY position LIMIT ?", (first, count))
            return [row for (row,) in rows]

    def masks(self, key: BatchKey) -> bytes:
        """The sum of the masks of a released secure sum; `Refused` before the release and after `forget`."""
        with self._transaction() as db:
            batch = Record.find(db, key)
            if not batch.numbers:
                raise Refused("other-kind", "this batch is of rows, which have no masks")
            batch.find_released(db)
            (masks,) = db.execute("SELECT masks FROM batches WHERE number = ?", (batch.number,)).fetchone()
            if not isinstance(masks, bytes) or len(masks) != WORD_BYTES * batch.numbers:
                raise Refused("storage", f"the shuffler's masks of batch {tuple(key)} are damaged")
            return masks

    def forget(self, key: BatchKey) -> None:
        """Delete a batch's released rows and masks: the aggregator has them. Does nothing if the batch holds none."""
        with self._transaction() as db:
            if db.execute("SELECT state FROM batches WHERE number = ?", (key.number,)).fetchone() == ("open",):
                raise Refused("not-ready", "this batch is not released yet; cancel it to be rid of it")
            _drop_released(db, key.number)

    def cancel(self, key: BatchKey) -> None:
        """Delete everything of a batch, and take no more for it."""
        with self._transaction() as db:
            Record.find(db, key).close(db, "cancelled", 0, None)
            _drop_released(db, key.number)

    def submission_limit(self) -> int:
        """Bytes of the largest submission that an open or recent batch allows: a late client is to be told so."""
        with self._transaction() as db:
            recent = "SELECT number FROM batches ORDER BY number DESC LIMIT 4"
            asked = f"SELECT MAX(max_rows * row_bytes) FROM batches WHERE state = 'open' OR number IN ({recent})"
            return int(db.execute(asked).fetchone()[0] or 0)

    # -- Inside a transaction

    def _permute(self, db: sqlite3.Connection, batch: Record) -> None:
        """Rows are copied inside the file in a random order; they do not pass through this process's memory."""
        contents = batch.contents(db)
        if self._log and self._log.released.get(batch.number, contents) != contents:
            raise Refused("storage", f"batch {tuple(batch.key)} was released before, with other rows: cancel it")
        order = [number for (number,) in db.execute(f"SELECT rowid FROM {batch.pending} ORDER BY rowid")]
        self._random.shuffle(order)
        (clients,) = db.execute(f"SELECT COUNT(*) FROM {batch.senders}").fetchone()
        db.execute(f"CREATE TABLE {batch.released} (position INTEGER PRIMARY KEY, row BLOB)")
        copy = f"INSERT INTO {batch.released} SELECT ?, row FROM {batch.pending} WHERE rowid = ?"
        db.executemany(copy, enumerate(order))
        _remember_answers(db, batch)
        if batch.numbers:
            masks = _sum_masks(db, batch, len(order))
            db.execute("UPDATE batches SET masks = ? WHERE number = ?", (masks, batch.number))
        batch.close(db, "released", clients, len(order))
        if self._log and batch.number not in self._log.released:
            self._log.append(batch.number, contents)  # last: what follows is the commit

    def _compare(self, log: ReleaseLog) -> None:
        """`ConfigError` where the database does not know of a release that was made, or the log does not."""
        with self._transaction() as db:
            for number, contents in log.released.items():
                state = db.execute("SELECT state FROM batches WHERE number = ?", (number,)).fetchone()
                batch = Record.find(db, BatchKey.of(number)) if state == ("open",) else None
                if batch is not None and batch.contents(db) == contents:
                    self._permute(db, batch)  # killed between the log's line and the release
                elif state is None or batch is not None:
                    raise ConfigError(_RESTORED)
            made = db.execute("SELECT number FROM batches WHERE state = 'released'").fetchall()
            if any(number not in log.released for (number,) in made):
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
                if isinstance(error, (OSError, *_BROKEN)):
                    raise Refused("storage", f"the shuffler's state cannot be used: {error}") from None
                raise


# -- A round's clients: its first exchange is released with those that have answered, every later one with exactly the
#    same, or not at all. The aggregator can match a later row to an earlier one of the same sample (it can predict
#    losses), so a client that answered only one of the two would own the rows without a match. The clients of the
#    first exchange are kept as keyed hashes of their names until the next round begins.


def _begin_exchange(db: sqlite3.Connection, key: BatchKey) -> None:
    """Forget who answered earlier rounds; a later exchange needs its own round's first to be released."""
    for (name,) in db.execute("SELECT name FROM sqlite_master WHERE name GLOB 'answered_[0-9]*'").fetchall():
        if name != f"answered_{key.round}":
            db.execute(f"DROP TABLE {name}")
    if key.exchange and not _answers(db, key.round):
        raise Refused("not-begun", f"the first exchange of round {key.round} was not released")


def _remember_answers(db: sqlite3.Connection, batch: Record) -> None:
    """Keep the clients that answered a round's first exchange, unless the next round has begun and needs none."""
    later = db.execute("SELECT 1 FROM batches WHERE number > ?", (BatchKey(batch.key.round, 255).number,)).fetchone()
    if batch.key.exchange or later:
        return
    tags = [(_tag(db, name),) for (name,) in db.execute(f"SELECT client FROM {batch.senders}")]
    db.execute(f"CREATE TABLE answered_{batch.key.round} (tag BLOB PRIMARY KEY) WITHOUT ROWID")
    db.executemany(f"INSERT INTO answered_{batch.key.round} VALUES (?)", tags)


def _answers(db: sqlite3.Connection, round: int) -> set[bytes]:
    """Hashes of the clients that answered the round's first exchange."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (f"answered_{round}",)).fetchone():
        return set()
    return {tag for (tag,) in db.execute(f"SELECT tag FROM answered_{round}")}


def _may_answer(db: sqlite3.Connection, batch: Record, client: str) -> bool:
    """In a round's first exchange, while there are fewer than were asked; later, who answered the first."""
    if batch.key.exchange:
        return _tag(db, client) in _answers(db, batch.key.round)
    return bool(db.execute(f"SELECT COUNT(*) < ? FROM {batch.senders}", (batch.asked,)).fetchone()[0])


def _status(db: sqlite3.Connection, batch: Record) -> Status:
    """Of an open batch how many have sent, and whether that is enough to release it."""
    if batch.state != "open":
        return Status(batch.state, batch.clients, batch.rows)
    (sent,) = db.execute(f"SELECT COUNT(*) FROM {batch.senders}").fetchone()
    # In a later exchange revoked ones too: the others' rows alone would point at theirs.
    all_sent = batch.key.exchange == 0 or sent == len(_answers(db, batch.key.round))
    return Status("ready" if sent >= batch.min_clients and all_sent else "open", sent)


def _tag(db: sqlite3.Connection, name: str) -> bytes:
    """A keyed hash of a client's name, 16 bytes: the same all through a run, and of no use in another file."""
    found = db.execute("SELECT value FROM facts WHERE name = 'salt'").fetchone()
    if found is None or not isinstance(salt := found[0], bytes) or len(salt) != 32:
        raise Refused("storage", "the shuffler's record of who answered is damaged")
    return hashlib.blake2b(name.encode(), key=salt, digest_size=16).digest()


# -- Announcements and masks


def _check_terms(db: sqlite3.Connection, terms: str) -> None:
    if db.execute("SELECT value FROM facts WHERE name = 'terms'").fetchone() != (terms,):
        raise Refused("other-terms", "this run began with other terms: give the new one a name of its own")


def _refuse_other(batch: Record, announced: Announced) -> None:
    """`Refused` unless this is what was announced under its key: a client that heard another must not answer it."""
    if batch.announced != announced:
        raise Refused("other-announcement", f"batch {tuple(announced.key)} was announced with other contents")


def _drop_released(db: sqlite3.Connection, number: int) -> None:
    db.execute("UPDATE batches SET masks = NULL WHERE number = ?", (number,))
    db.execute(f"DROP TABLE IF EXISTS released_{number}")


def _check_kind(batch: Record, seed: bytes | None) -> None:
    """`Refused` unless a seed comes with what is sent to a secure sum, and only there: a seed among rows would be
    released with them.
    """
    if bool(batch.numbers) != (seed is not None):
        what = "is a secure sum" if batch.numbers else "is of rows"
        raise Refused("other-kind", f"this batch {what}, and what was sent is not for one")
    if seed is not None and len(seed) != SEED_BYTES:
        raise Refused("malformed", f"the seed of a mask has {SEED_BYTES} bytes, got {len(seed)}")


def _sum_masks(db: sqlite3.Connection, batch: Record, rows: int) -> bytes:
    """The sum of the masks of all clients that have sent; `Refused` where one of their seeds is lost."""
    seeds = [seed for (seed,) in db.execute(f"SELECT seed FROM {batch.senders}")]
    if len(seeds) != rows or not all(isinstance(seed, bytes) and len(seed) == SEED_BYTES for seed in seeds):
        raise Refused("storage", f"the shuffler's seeds of batch {tuple(batch.key)} are damaged")
    from ntkfl.crypto.masking import pack_words, sum_masks  # numpy comes with it, which rows do without

    return pack_words(sum_masks(seeds, batch.announced, batch.numbers))


def _connect(path: Path | None, run: str) -> sqlite3.Connection:
    """The database, readable by its owner alone, in which nothing stays of what is deleted."""
    try:
        if path is not None:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            os.fchmod(handle, 0o600)
            os.close(handle)
        db = sqlite3.connect(path or ":memory:", timeout=2, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode = TRUNCATE")  # first: a killed process may have left one
        db.execute("PRAGMA secure_delete = ON")
        db.execute("PRAGMA temp_store = MEMORY")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("BEGIN IMMEDIATE")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            for statement in filter(str.strip, _SCHEMA.split(";")):
                db.execute(statement)
            db.execute("INSERT INTO facts VALUES ('run', ?)", (run,))
        old = version not in (0, PROTOCOL)
        owner = None if old else db.execute("SELECT value FROM facts WHERE name = 'run'").fetchone()
        db.execute("COMMIT")
    except (OSError, *_BROKEN) as error:
        raise ConfigError(f"cannot use the shuffler's state {path}, maybe another process does: {error}") from None
    if old or owner != (run,):
        db.close()
        raise ConfigError(f"{path} is of another {'version of ntkfl' if old else 'run'}: move it away")
    return db
