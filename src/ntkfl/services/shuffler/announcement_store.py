"""What passes through the shuffler besides batches: announcements, present clients, evaluators' reports, revocations.

The aggregator talks to clients only through it, so it never sees a client's address or timing. There is one
announcement per round and exchange: its digest is kept for the whole run, and another one is refused. All of it lies in
one SQLite file (or in memory), which the batches of `store.py` share, so that one transaction can hold both.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ntkfl.crypto.row_frames import DIGEST_BYTES, VERSION, Announced, BatchKey
from ntkfl.errors import ConfigError, Refused
from ntkfl.services.shuffler.batch import EVALUATION

ANNOUNCEMENTS = 4  # kept for clients that are behind
REPORTS = 8  # kept of an evaluator
REPORT_BYTES = 1 << 16
_ASKED = "SELECT 1 FROM announced WHERE number = ?"
_SILENT = """SELECT client FROM present WHERE role = 'evaluator'
  AND client NOT IN (SELECT evaluator FROM reports WHERE number = ?) ORDER BY client"""
BROKEN = (sqlite3.Error, UnicodeDecodeError)  # of a damaged file: SQLite quotes it in what it says
_SCHEMA = f"""
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE announcements (sequence INTEGER PRIMARY KEY, signed BLOB);
CREATE TABLE announced (number INTEGER PRIMARY KEY, digest BLOB, sequence INTEGER);
CREATE TABLE present (client TEXT PRIMARY KEY, role TEXT) WITHOUT ROWID;
CREATE TABLE revoked (client TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE reports (number INTEGER, evaluator TEXT, sealed BLOB, PRIMARY KEY (number, evaluator));
CREATE TABLE batches (number INTEGER PRIMARY KEY, salt BLOB, state TEXT, max_rows INTEGER,
  row_bytes INTEGER, min_clients INTEGER, deadline REAL, clients INTEGER, rows INTEGER);
CREATE TABLE rounds (round INTEGER PRIMARY KEY, salt BLOB, cohort BLOB);
CREATE TABLE sums (number INTEGER PRIMARY KEY, numbers INTEGER, masks BLOB);
PRAGMA user_version = {VERSION};
"""


class AnnouncementStore:
    """Announcements, presence, reports and revocations of one run. Thread-safe; a file has one process at a time."""

    def __init__(self, path: Path | None = None, run: str = "") -> None:
        self._lock, self._publisher = threading.Lock(), threading.Lock()
        self._db = _connect(path, run)
        with self._transaction() as db:  # a thousand clients ask for the same bytes: they are held once
            self._announcements: dict[int, bytes] = dict(db.execute("SELECT * FROM announcements ORDER BY sequence"))

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def check(self) -> None:
        """`Refused` while the state cannot be used."""
        with self._transaction():
            pass

    @property
    def newest(self) -> int:
        """The newest announcement's sequence number; 0: none yet. Never waits."""
        return max(self._announcements, default=0)

    def announcement(self, after: int) -> tuple[int, bytes] | None:
        """The first announcement kept that has a higher sequence number. Never waits."""
        kept = self._announcements
        sequence = min((number for number in kept if number > after), default=None)
        return None if sequence is None else (sequence, kept[sequence])

    def present(self, client: str, role: str) -> None:
        """Remember that an enrolled client is there; not since when."""
        with self._transaction() as db:
            refuse_revoked(db, client)
            db.execute("INSERT OR REPLACE INTO present VALUES (?, ?)", (client, role))

    def clients(self, role: str) -> list[str]:
        """Names of those present in that role, sorted, without the revoked."""
        with self._transaction() as db:
            found = db.execute("SELECT client FROM present WHERE role = ? ORDER BY client", (role,))
            return [name for (name,) in found]

    def refuse_revoked(self, client: str) -> None:
        """`Refused` if this client is revoked."""
        with self._transaction() as db:
            refuse_revoked(db, client)

    def latest(self) -> tuple[int, BatchKey | None]:
        """The newest announcement's sequence number (0: none yet) and its key."""
        with self._transaction() as db:
            number = db.execute("SELECT MAX(number) FROM announced").fetchone()[0]
            return self.newest, None if number is None else BatchKey.of(number)

    def announced(self, key: BatchKey) -> Announced:
        """What was announced under the key; `Refused` if nothing was."""
        with self._transaction() as db:
            return find_announced(db, key)

    def report(self, evaluator: str, announced: Announced, sealed: bytes | memoryview) -> None:
        """Keep an evaluator's sealed reply, one per key: it speaks for data of its own and hides among nobody."""
        with self._transaction() as db:
            refuse_revoked(db, evaluator)
            refuse_other(db, announced)
            if db.execute("SELECT role FROM present WHERE client = ?", (evaluator,)).fetchone() != ("evaluator",):
                raise Refused("not-evaluator", "only evaluators report")
            if not 1 <= len(sealed) <= REPORT_BYTES:
                raise Refused("too-large", f"a report may have 1 to {REPORT_BYTES} bytes, got {len(sealed)}")
            try:
                db.execute("INSERT INTO reports VALUES (?, ?, ?)", (announced.key.number, evaluator, sealed))
            except sqlite3.IntegrityError:
                raise Refused("replayed", "this evaluator's report is here already") from None
            old = "SELECT number FROM reports WHERE evaluator = ?1 ORDER BY number DESC LIMIT -1 OFFSET ?2"
            db.execute(f"DELETE FROM reports WHERE evaluator = ?1 AND number IN ({old})", (evaluator, REPORTS))

    def reports(self, key: BatchKey) -> list[bytes]:
        """The sealed reports, in an order that says nothing."""
        with self._transaction() as db:
            found = db.execute("SELECT sealed FROM reports WHERE number = ? ORDER BY sealed", (key.number,))
            return [sealed for (sealed,) in found]

    def silent_evaluators(self, db: sqlite3.Connection, key: BatchKey) -> list[str]:
        """Those that have not reported under the key, of an evaluation that asks for reports; else nobody."""
        if key.exchange != EVALUATION or not db.execute(_ASKED, (key.number,)).fetchone():
            return []
        return [name for (name,) in db.execute(_SILENT, (key.number,))]

    @contextmanager
    def _publishing(self, signed: bytes, key: BatchKey) -> Iterator[tuple[sqlite3.Connection, int]]:
        """A transaction that also publishes: its connection and the announcement's sequence number."""
        with self._publisher:  # until memory holds what the file holds
            kept = self._announcements
            newest = max(kept, default=0)
            with self._transaction() as db:
                sequence = admit(db, Announced.of(key, signed), newest + 1)
                if sequence > newest:
                    db.execute("INSERT INTO announcements VALUES (?, ?)", (sequence, signed))
                    db.execute("DELETE FROM announcements WHERE sequence <= ?", (sequence - ANNOUNCEMENTS,))
                yield db, sequence
            if sequence > newest:
                kept = kept | {sequence: signed}
                self._announcements = {number: kept[number] for number in sorted(kept)[-ANNOUNCEMENTS:]}

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
                if isinstance(error, BROKEN):
                    raise Refused("storage", f"the shuffler's state cannot be used: {error}") from None
                raise


def refuse_revoked(db: sqlite3.Connection, client: str) -> None:
    if db.execute("SELECT 1 FROM revoked WHERE client = ?", (client,)).fetchone():
        raise Refused("revoked", "this client is revoked")


def admit(db: sqlite3.Connection, announced: Announced, sequence: int) -> int:
    """The sequence number of the one announcement under this key: `sequence` if it is new, its own if it was admitted
    before. `Refused` if another has its key, or a later one was admitted.
    """
    number = announced.check().key.number
    known = db.execute("SELECT sequence FROM announced WHERE number = ?", (number,)).fetchone()
    if known is not None:
        refuse_other(db, announced)
        return int(known[0])
    if db.execute("SELECT 1 FROM announced WHERE number > ?", (number,)).fetchone():
        raise Refused("backwards", f"batch {tuple(announced.key)} is older than one announced before")
    db.execute("INSERT INTO announced VALUES (?, ?, ?)", (number, announced.digest, sequence))
    return sequence


def find_announced(db: sqlite3.Connection, key: BatchKey) -> Announced:
    found = db.execute("SELECT digest FROM announced WHERE number = ?", (key.number,)).fetchone()
    if found is None:
        raise Refused("unknown-batch", f"no batch {tuple(key)} was announced")
    if not isinstance(found[0], bytes) or len(found[0]) != DIGEST_BYTES:
        raise Refused("storage", f"the shuffler's record of batch {tuple(key)} is damaged")
    return Announced(key, found[0])


def refuse_other(db: sqlite3.Connection, announced: Announced) -> None:
    """`Refused` unless this is what was announced under its key: a client that heard another must not answer it."""
    if find_announced(db, announced.key) != announced:
        raise Refused("other-announcement", f"batch {tuple(announced.key)} was announced with other contents")


def _connect(path: Path | None, run: str) -> sqlite3.Connection:
    """The database, readable by its owner alone, in which nothing stays of what is deleted."""
    try:
        if path is not None:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
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
        old = version not in (0, VERSION)
        owner = None if old else db.execute("SELECT value FROM facts WHERE name = 'run'").fetchone()
        db.execute("COMMIT")
    except (OSError, *BROKEN) as error:
        raise ConfigError(f"cannot use the shuffler's state {path}, maybe another process does: {error}") from None
    if old:
        db.close()
        raise ConfigError(f"{path} was written by protocol version {version}, this is {VERSION}: begin a new run")
    if owner != (run,):
        db.close()
        raise ConfigError(f"{path} is of another run; move it away to begin this one")
    return db
