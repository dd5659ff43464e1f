"""The shuffler: collects one batch of sealed rows per exchange, and releases it permuted, without their senders.

While a batch is open, the sender of each row is known: that is how replays are refused and distinct clients counted. At
its release that knowledge is deleted in the same transaction. Everything that names a sender, and every row, lies in
tables of its own batch, which are dropped whole: SQLite then overwrites all their pages with zeros (`secure_delete`).
Single records deleted from a table that lives on can leave copies behind in its pages. What the file system or the
disk keep of overwritten and truncated files is beyond this module.

A round has one cohort, and later exchanges of it exactly the clients that answered the first (`round_cohort.py`).

A submission is one transaction and is accepted once it is committed, so a process killed at any moment has lost
nothing it said it had. What the aggregator may count while a batch is open is clients, never rows: the difference of
two counts would be the size of one client's share.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random, SystemRandom

from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.errors import Refused
from ntkfl.services.shuffler.announcement_store import (
    AnnouncementStore,
    admit,
    find_announced,
    refuse_other,
    refuse_revoked,
)
from ntkfl.services.shuffler.batch import CLOSED, COLUMNS, EVALUATORS, Batch, Record, Status, least_of
from ntkfl.services.shuffler.mask_store import (
    check_kind,
    drop_seed,
    find_masks,
    forget_masks,
    keep_seed,
    open_sum,
    release_masks,
)
from ntkfl.services.shuffler.presence import Presence
from ntkfl.services.shuffler.round_cohort import forget_answers, members, remember_answers

_GENERATOR = SystemRandom()  # the operating system's


class Shuffler(AnnouncementStore):
    """The batches of one run, in a file or (no `path`) in memory, and what else passes through. Thread-safe.

    `floor` is its operator's: the aggregator cannot ask for smaller anonymity sets. A file belongs to one `run`.
    """

    def __init__(
        self,
        path: Path | None = None,
        floor: int = 2,
        clock: Callable[[], float] | None = None,
        random: Random = _GENERATOR,
        run: str = "",
        presence: Presence | None = None,
    ) -> None:
        super().__init__(path, run)
        self.presence = presence or Presence()
        self._floor, self._clock, self._random = floor, clock or self._steady_clock(), random

    def open(self, batch: Batch, digest: bytes) -> None:
        """Accept rows for the batch from now on, in answer to the announcement with this SHA-256. Asking again for the
        same one is harmless.
        """
        with self._transaction() as db:
            admit(db, Announced(batch.check().key, digest), 0)
            forget_answers(db, batch.key.round)
            self._open(db, batch)

    def publish(self, signed: bytes, key: BatchKey, batch: Batch | None = None) -> int:
        """Relay an announcement and open the batch it asks for, both or neither: the announcement's sequence number.

        Publishing an announcement again gives its number again; another one under its key is refused.
        """
        with self._publishing(signed, key) as (db, sequence):
            forget_answers(db, key.round)
            if batch is not None:
                self._open(db, batch)
        return sequence

    def submit(
        self,
        client: str,
        announced: Announced,
        rows: Sequence[bytes | memoryview],
        seed: bytes | None = None,
    ) -> None:
        """Take all of a client's rows, once, or `Refused`. On return they are on the disk.

        For a secure sum there is one row, the masked vector, and the `seed` of its mask: both are kept or neither. A
        batch takes the one kind or the other, so that no seed can end among rows that are released.
        """
        self.presence.called(client)
        with self._transaction() as db:
            refuse_revoked(db, client)
            refuse_other(db, announced)
            batch = Record.find(db, announced.key)
            if batch.state != "open":
                raise Refused(*CLOSED[batch.state])
            check_kind(batch, seed)
            asked = db.execute(f"SELECT sent FROM {batch.cohort} WHERE client = ?", (client,)).fetchone()
            if asked is None:
                raise Refused("not-asked", "this batch does not ask this client")
            if asked[0] is not None:
                raise Refused("replayed", "this client's rows of this batch are here already")
            if len(rows) != batch.max_rows:  # more would weigh more, and a number of one's own would tell clients apart
                raise Refused("row-count", f"every client sends exactly {batch.max_rows} rows, got {len(rows)}")
            if any(len(row) != batch.row_bytes for row in rows):
                raise Refused("row-size", f"every sealed row must have {batch.row_bytes} bytes")
            values = ((client, hashlib.blake2b(row, key=batch.salt, digest_size=16).digest(), row) for row in rows)
            try:
                db.executemany(f"INSERT INTO {batch.pending} VALUES (?, ?, ?)", values)
            except sqlite3.IntegrityError:
                raise Refused("replayed", "one of these rows is here already") from None
            if seed is not None:
                keep_seed(db, batch, client, seed)
            db.execute(f"UPDATE {batch.cohort} SET sent = ? WHERE client = ?", (len(rows), client))

    def status(self, key: BatchKey) -> Status:
        """Ready is a batch of at least `min_clients` when all of its cohort have sent or its deadline has passed; in a
        later exchange of a round, only when all clients of the first have sent.
        """
        with self._transaction() as db:
            return self._status(db, Record.find(db, key))

    def release(self, key: BatchKey) -> list[bytes]:
        """The rows of a ready batch, permuted; from then on their senders are not known.

        Asked again it gives the same rows in the same order, until `forget`.
        """
        count, _ = self.permute(key)
        return self.released(key, 0, count)

    def permute(self, key: BatchKey) -> tuple[int, int]:
        """Permute a ready batch and delete its senders: how many rows it has, and bytes of each.

        Rows are copied inside the file in a random order; none of them passes through this process's memory for long.
        """
        with self._transaction() as db:
            batch = Record.find(db, key)
            status = self._status(db, batch)
            if status.state == "cancelled":
                raise Refused(*CLOSED["cancelled"])
            if status.state == "open":
                need = f"at least {batch.min_clients} and the deadline or the whole cohort"
                raise Refused("not-ready", f"{status.clients} clients have sent rows; release needs {need}")
            if status.state == "released":
                batch.find_released(db)
                return int(status.rows or 0), batch.row_bytes
            order = [number for (number,) in db.execute(f"SELECT rowid FROM {batch.pending} ORDER BY rowid")]
            self._random.shuffle(order)
            db.execute(f"CREATE TABLE {batch.released} (position INTEGER PRIMARY KEY, row BLOB)")
            if batch.key.exchange == 0:
                remember_answers(db, batch)
            copy = f"INSERT INTO {batch.released} SELECT ?, row FROM {batch.pending} WHERE rowid = ?"
            db.executemany(copy, enumerate(order))
            if batch.numbers:
                release_masks(db, batch, find_announced(db, key))
            absent = batch.absent(db)
            batch.close(db, "released", status.clients, len(order))
        self.presence.missed(key.number, absent)
        return len(order), batch.row_bytes

    def released(self, key: BatchKey, first: int, count: int) -> list[bytes]:
        """`count` rows of a released batch, from the permutation's position `first` on; `Refused` before and after."""
        with self._transaction() as db:
            table = Record.find(db, key).find_released(db)
            some = f"SELECT row FROM {table} WHERE position >= ? ORDER BY position LIMIT ?"
            return [row for (row,) in db.execute(some, (first, count))]

    def masks(self, key: BatchKey) -> bytes:
        """The sum of the masks of a released secure sum; `Refused` before the release and after `forget`."""
        with self._transaction() as db:
            return find_masks(db, Record.find(db, key))

    def forget(self, key: BatchKey) -> None:
        """Delete a batch's released rows, masks and reports: the aggregator has them. Harmless where there are none."""
        with self._transaction() as db:
            state = db.execute("SELECT state FROM batches WHERE number = ?", (key.number,)).fetchone()
            if state == ("open",):
                raise Refused("not-ready", "this batch is not released yet; cancel it to be rid of it")
            absent = () if state else self.silent_evaluators(db, key)
            db.execute("DELETE FROM reports WHERE number = ?", (key.number,))
            forget_masks(db, key.number)
            db.execute(f"DROP TABLE IF EXISTS released_{key.number}")
        self.presence.missed(key.number, absent)

    def cancel(self, key: BatchKey) -> None:
        """Delete everything of a batch, and take no more for it."""
        with self._transaction() as db:
            batch = Record.find(db, key)
            absent = batch.absent(db)
            batch.close(db, "cancelled", 0, None)
            db.execute(f"DROP TABLE IF EXISTS {batch.released}")
            forget_masks(db, batch.number)
            db.execute("DELETE FROM reports WHERE number = ?", (batch.number,))
        self.presence.missed(key.number, absent)

    def lapsed(self, role: str) -> list[str]:
        """Of those present in that role, the ones that are not waited for, sorted."""
        lapsed = self.presence.lapsed()
        return [name for name in self.clients(role) if name in lapsed]

    def set_revoked(self, clients: frozenset[str], serial: int = 0) -> bool:
        """These, and no others, are revoked; False, and nothing is done, for a list older than the one in force."""
        with self._transaction() as db:
            known = db.execute("SELECT value FROM facts WHERE name = 'serial'").fetchone()
            if known is not None and serial < known[0]:
                return False
            db.execute("INSERT OR REPLACE INTO facts VALUES ('serial', ?)", (serial,))
            before = {name for (name,) in db.execute("SELECT client FROM revoked")}
            db.executemany("DELETE FROM revoked WHERE client = ?", ((name,) for name in before - clients))
            for client in sorted(clients - before):
                _revoke(db, client)
            return True

    def submission_limit(self) -> int:
        """Bytes of the largest submission that an open or recent batch allows: a late client is to be told so."""
        with self._transaction() as db:
            recent = "SELECT number FROM batches ORDER BY number DESC LIMIT 4"
            asked = f"SELECT MAX(max_rows * row_bytes) FROM batches WHERE state = 'open' OR number IN ({recent})"
            return int(db.execute(asked).fetchone()[0] or 0)

    def _open(self, db: sqlite3.Connection, batch: Batch) -> None:
        number = batch.check().key.number
        if batch.min_clients < (least := least_of(batch.key, self._floor)):
            raise Refused("below-floor", f"no batch here has fewer than {least} clients")
        if db.execute("SELECT 1 FROM batches WHERE number = ?", (number,)).fetchone():
            return  # by the same announcement, or it would not have been admitted
        asked = members(db, batch)
        salt, deadline = os.urandom(32), None if batch.seconds is None else self._clock() + batch.seconds
        values = (salt, "open", batch.max_rows, batch.row_bytes, batch.min_clients, deadline, 0, None)
        db.execute(f"INSERT INTO batches ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (number, *values))
        db.execute("INSERT OR REPLACE INTO facts VALUES ('clock', ?)", (self._clock(),))
        db.execute(f"CREATE TABLE cohort_{number} (client TEXT PRIMARY KEY, sent INTEGER) WITHOUT ROWID")
        db.execute(f"CREATE TABLE pending_{number} (client TEXT, digest BLOB UNIQUE, row BLOB)")
        if batch.numbers:
            open_sum(db, number, batch.numbers)
        db.executemany(f"INSERT INTO cohort_{number} VALUES (?, NULL)", ((name,) for name in sorted(asked)))

    def _steady_clock(self) -> Callable[[], float]:
        """Wall-clock time when this process began, and then what has passed by the monotonic clock. It begins no
        earlier than the last batch was opened, so that a restart cannot give a batch more time than it was opened with.
        """
        with self._transaction() as db:
            known = db.execute("SELECT value FROM facts WHERE name = 'clock'").fetchone()
        last = known[0] if known and isinstance(known[0], float) else 0.0
        offset = max(time.time(), last) - time.monotonic()
        return lambda: offset + time.monotonic()

    def _status(self, db: sqlite3.Connection, batch: Record) -> Status:
        if batch.state != "open":
            return Status(batch.state, batch.clients, batch.rows, None)
        gone = "SUM(sent IS NULL AND client IN (SELECT client FROM revoked))"
        sent, asked, revoked = db.execute(f"SELECT COUNT(sent), COUNT(*), {gone} FROM {batch.cohort}").fetchone()
        missing: tuple[str, ...] = ()
        left = None if batch.deadline is None else max(0.0, batch.deadline - self._clock())
        if batch.key.exchange in (0, EVALUATORS):
            ready = left == 0 or self._all_sent(db, batch, asked - sent - (revoked or 0))
        else:  # a revoked one too: the others' rows alone would point at its own of the first exchange
            ready, missing = sent == asked, tuple(batch.absent(db)) if left == 0 else ()
        ready = ready and sent >= batch.min_clients
        return Status("ready" if ready else "open", sent, None, left, missing)

    def _all_sent(self, db: sqlite3.Connection, batch: Record, left: int) -> bool:
        """Whether the `left` that have not sent, and are not revoked, have all lapsed."""
        lapsed = self.presence.lapsed() if left else frozenset()
        if left > len(lapsed):
            return False
        revoked = {name for (name,) in db.execute("SELECT client FROM revoked")} if left else set()
        return not left or lapsed.union(revoked).issuperset(batch.absent(db))


def _revoke(db: sqlite3.Connection, client: str) -> None:
    """Take nothing from this client any more, and delete what open batches hold of it."""
    db.execute("INSERT OR IGNORE INTO revoked VALUES (?)", (client,))
    db.execute("DELETE FROM present WHERE client = ?", (client,))
    db.execute("DELETE FROM reports WHERE evaluator = ?", (client,))
    for (number,) in db.execute("SELECT number FROM batches WHERE state = 'open'").fetchall():
        db.execute(f"UPDATE cohort_{number} SET sent = NULL WHERE client = ?", (client,))
        db.execute(f"DELETE FROM pending_{number} WHERE client = ?", (client,))
        drop_seed(db, number, client)
