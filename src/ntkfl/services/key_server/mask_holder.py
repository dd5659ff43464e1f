"""The second holder of masks: a seed per client until the released set is known, then the sum of its masks, once.

Every function works inside a transaction of the caller's, on the key server's file or, in a simulation, in memory. A
seed whose owner the shuffler did not release is in no sum, and is deleted with the others of its round.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3

from ntkfl.crypto.mask_format import MOST_NUMBERS, SEED_BYTES, TICKET_BYTES
from ntkfl.crypto.mask_tickets import ReleasedSet, join_tickets
from ntkfl.crypto.row_frames import Announced
from ntkfl.errors import Refused

_SEEDS = """CREATE TABLE IF NOT EXISTS second_seeds (run TEXT, client TEXT, number INTEGER, digest BLOB, seed BLOB,
  ticket BLOB, PRIMARY KEY (run, client)) WITHOUT ROWID"""
_SUMS = "CREATE TABLE IF NOT EXISTS second_sums (run TEXT PRIMARY KEY, number INTEGER, released BLOB, masks BLOB)"

_DAMAGED = "the key server's record of masks is damaged"


def prepare(db: sqlite3.Connection) -> None:
    """Tables that files from before second holders lack; what is deleted is overwritten."""
    db.execute("PRAGMA secure_delete = ON")
    db.execute(_SEEDS)
    db.execute(_SUMS)


def take_seed(db: sqlite3.Connection, run: str, client: str, announced: Announced, seed: bytes) -> bytes:
    """Keep a client's seed: the ticket for it. The same seed again gives the same ticket, another is refused.

    Of a client only the newest is kept: it answers nothing older any more.
    """
    if len(seed) != SEED_BYTES:
        raise Refused("malformed", f"the seed of a mask has {SEED_BYTES} bytes, got {len(seed)}")
    number, digest = announced.check().key.number, announced.digest
    mine = "SELECT number, digest, seed, ticket FROM second_seeds WHERE run = ? AND client = ?"
    known = db.execute(mine, (run, client)).fetchone()
    if known is not None and [type(value) for value in known] != [int, bytes, bytes, bytes]:
        raise Refused("no-state", _DAMAGED)
    if known is not None and known[:3] == (number, digest, seed):
        return _checked(known[3], TICKET_BYTES)
    if known is not None and known[0] == number:
        raise Refused("replayed", "another seed of this client for this batch is here already")
    if number <= max(_released(db, run)[0], -1 if known is None else known[0]):
        raise Refused("late", "the masks of this batch, or of a later one, were asked for already")
    ticket = os.urandom(TICKET_BYTES)
    db.execute(
        "INSERT OR REPLACE INTO second_seeds VALUES (?, ?, ?, ?, ?, ?)", (run, client, number, digest, seed, ticket)
    )
    return ticket


def release(db: sqlite3.Connection, run: str, released: ReleasedSet, floor: int) -> bytes:
    """The sum of the masks of exactly these tickets, 4 bytes per number; their seeds are deleted, with all of the run
    that are as old. Asked again for the same set it answers the same until the next; another set is refused.
    """
    announced, numbers, tickets = released
    number, name = announced.check().key.number, hashlib.sha256(join_tickets(tickets)).digest()
    last, known, masks = _released(db, run)
    if number == last and known == name:
        return masks
    if number <= last:
        raise Refused("forgotten", "the masks of this batch, or of a later one, were given out already, for one set")
    if not 1 <= numbers <= MOST_NUMBERS:
        raise Refused("terms", f"a mask has 1 to {MOST_NUMBERS} numbers, got {numbers}")
    held = "SELECT ticket, seed FROM second_seeds WHERE run = ? AND number = ? AND digest = ?"
    seeds: dict[bytes, bytes] = dict(db.execute(held, (run, number, announced.digest)))
    if not seeds.keys() >= set(tickets):
        raise Refused("unknown-batch", "the released set has a client that gave no seed here for this announcement")
    if len(tickets) < floor:
        raise Refused("below-floor", f"no sum here is of fewer than {floor} clients")
    from ntkfl.crypto.masking import pack_words, sum_masks  # numpy comes with it, which other requests do without

    own = [_checked(seeds[ticket], SEED_BYTES) for ticket in tickets]
    masks = pack_words(sum_masks(own, announced, numbers))
    db.execute("INSERT OR REPLACE INTO second_sums VALUES (?, ?, ?, ?)", (run, number, name, masks))
    # The table is dropped whole: single records that are deleted can leave copies in the pages of one that lives on.
    kept = db.execute("SELECT * FROM second_seeds WHERE run != ? OR number > ?", (run, number)).fetchall()
    db.execute("DROP TABLE second_seeds")
    db.execute(_SEEDS)
    db.executemany("INSERT INTO second_seeds VALUES (?, ?, ?, ?, ?, ?)", kept)
    return masks


def _released(db: sqlite3.Connection, run: str) -> tuple[int, bytes, bytes]:
    """The newest batch that masks were given out for (−1: none), a digest of the set, and the masks."""
    found = db.execute("SELECT number, released, masks FROM second_sums WHERE run = ?", (run,)).fetchone()
    if found is None:
        return -1, b"", b""
    if not (isinstance(found[0], int) and isinstance(found[1], bytes) and isinstance(found[2], bytes)):
        raise Refused("no-state", _DAMAGED)
    return found[0], found[1], found[2]


def _checked(value: object, size: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != size:
        raise Refused("no-state", _DAMAGED)
    return value
