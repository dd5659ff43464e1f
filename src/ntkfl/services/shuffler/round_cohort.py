"""A round's cohort: its first exchange is released with the clients that answered in time, every later one with exactly
the same clients, or not at all.

The aggregator can match a later row to an earlier one of the same sample (it can predict losses), so a client that
answered only one of the two would be the owner of the rows without a match. The clients of the first exchange are kept
as keyed hashes of names until the next round begins. Every function works inside a transaction of the caller's.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import sqlite3
from collections.abc import Iterable

from ntkfl.crypto.row_frames import BatchKey
from ntkfl.errors import Refused
from ntkfl.services.shuffler.batch import EVALUATORS, Batch, Record


def members(db: sqlite3.Connection, batch: Batch) -> Iterable[str]:
    """The clients a batch waits for: in a round's first exchange its cohort, later those that answered the first; or
    evaluators, who answer nothing else.
    """
    round, exchange = batch.key
    if exchange == EVALUATORS:
        there = {name for (name,) in db.execute("SELECT client FROM present WHERE role = 'evaluator'")}
        if not batch.numbers or not there.issuperset(batch.cohort):
            raise Refused("not-evaluator", "this exchange is a secure sum of evaluators' counts")
        return batch.cohort
    if exchange == 0:
        salt = os.urandom(32)
        db.execute("INSERT INTO rounds VALUES (?, ?, ?)", (round, salt, batch.cohort_digest(salt)))
        return batch.cohort
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (f"answered_{round}",)).fetchone():
        raise Refused("not-begun", f"the first exchange of round {round} was not released")
    salt, cohort = _find_round(db, round)
    if not hmac.compare_digest(batch.cohort_digest(salt), cohort):
        raise Refused("other-cohort", f"the cohort of round {round} cannot change: take the next round")
    answered = {tag for (tag,) in db.execute(f"SELECT tag FROM answered_{round}")}
    return [name for name in batch.cohort if _tag(salt, name) in answered]


def remember_answers(db: sqlite3.Connection, batch: Record) -> None:
    """Keep the clients that answered a round's first exchange, unless the next round has begun and needs none."""
    round = batch.key.round
    if db.execute("SELECT 1 FROM announced WHERE number > ?", (BatchKey(round, 255).number,)).fetchone():
        return
    salt, _ = _find_round(db, round)
    sent = db.execute(f"SELECT client FROM {batch.cohort} WHERE sent IS NOT NULL").fetchall()
    db.execute(f"CREATE TABLE answered_{round} (tag BLOB PRIMARY KEY) WITHOUT ROWID")
    db.executemany(f"INSERT INTO answered_{round} VALUES (?)", ((_tag(salt, name),) for (name,) in sent))


def forget_answers(db: sqlite3.Connection, round: int) -> None:
    """Of all rounds before this one."""
    for (name,) in db.execute("SELECT name FROM sqlite_master WHERE name GLOB 'answered_[0-9]*'").fetchall():
        number = name.removeprefix("answered_")
        if number.isdecimal() and int(number) < round:
            db.execute(f"DROP TABLE answered_{int(number)}")


def _find_round(db: sqlite3.Connection, round: int) -> tuple[bytes, bytes]:
    """The salt of a round's hashes, and its cohort's."""
    found = db.execute("SELECT salt, cohort FROM rounds WHERE round = ?", (round,)).fetchone()
    if found is None or not all(isinstance(value, bytes) and len(value) == 32 for value in found):
        raise Refused("storage", f"the shuffler's record of round {round} is damaged")
    return found[0], found[1]


def _tag(salt: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), key=salt, digest_size=16).digest()
