"""Secure sums at the shuffler: seeds of masks until the release, then their sum, in the file that batches lie in.

Every function works inside a transaction of the caller's, so that a seed is kept with its masked vector or not at all,
and the seeds are deleted in the transaction that releases the vectors.
"""

from __future__ import annotations

import sqlite3

from ntkfl.crypto.mask_format import SEED_BYTES, WORD_BYTES
from ntkfl.crypto.row_frames import Announced
from ntkfl.errors import Refused
from ntkfl.services.shuffler.batch import Record


def open_sum(db: sqlite3.Connection, number: int, numbers: int) -> None:
    """Take seeds for the batch with this number, whose vectors have so many numbers."""
    db.execute("INSERT INTO sums VALUES (?, ?, NULL)", (number, numbers))
    db.execute(f"CREATE TABLE seeds_{number} (client TEXT PRIMARY KEY, seed BLOB) WITHOUT ROWID")


def check_kind(batch: Record, seed: bytes | None) -> None:
    """`Refused` unless a seed comes with what is sent to a secure sum, and only there: a seed among rows would be
    released with them.
    """
    if bool(batch.numbers) != (seed is not None):
        what = "is a secure sum" if batch.numbers else "is of rows"
        raise Refused("other-kind", f"this batch {what}, and what was sent is not for one")
    if seed is not None and len(seed) != SEED_BYTES:
        raise Refused("malformed", f"the seed of a mask has {SEED_BYTES} bytes, got {len(seed)}")


def keep_seed(db: sqlite3.Connection, batch: Record, client: str, seed: bytes) -> None:
    db.execute(f"INSERT INTO {batch.seeds} VALUES (?, ?)", (client, seed))


def release_masks(db: sqlite3.Connection, batch: Record, announced: Announced) -> None:
    """Keep the sum of the masks of all clients that have sent, and delete their seeds."""
    seeds = [seed for (seed,) in db.execute(f"SELECT seed FROM {batch.seeds}")]
    (rows,) = db.execute(f"SELECT COUNT(*) FROM {batch.pending}").fetchone()
    if len(seeds) != rows or not all(isinstance(seed, bytes) and len(seed) == SEED_BYTES for seed in seeds):
        raise Refused("storage", f"the shuffler's seeds of batch {tuple(batch.key)} are damaged")
    from ntkfl.crypto.masking import pack_words, sum_masks  # numpy comes with it, which rows do without

    total = pack_words(sum_masks(seeds, announced, batch.numbers))
    db.execute("UPDATE sums SET masks = ? WHERE number = ?", (total, batch.number))
    db.execute(f"DROP TABLE {batch.seeds}")


def find_masks(db: sqlite3.Connection, batch: Record) -> bytes:
    """The sum of the masks of a released secure sum; `Refused` where there is none."""
    if not batch.numbers:
        raise Refused("other-kind", "this batch is of rows, which have no masks")
    batch.find_released(db)
    (masks,) = db.execute("SELECT masks FROM sums WHERE number = ?", (batch.number,)).fetchone()
    if not isinstance(masks, bytes) or len(masks) != WORD_BYTES * batch.numbers:
        raise Refused("storage", f"the shuffler's masks of batch {tuple(batch.key)} are damaged")
    return masks


def forget_masks(db: sqlite3.Connection, number: int) -> None:
    db.execute("UPDATE sums SET masks = NULL WHERE number = ?", (number,))


def drop_seed(db: sqlite3.Connection, number: int, client: str) -> None:
    """Of a client that is revoked, from an open batch."""
    if db.execute("SELECT 1 FROM sums WHERE number = ?", (number,)).fetchone():
        db.execute(f"DELETE FROM seeds_{number} WHERE client = ?", (client,))
