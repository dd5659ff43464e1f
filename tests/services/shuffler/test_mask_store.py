"""Secure sums in the shuffler's file: seed and vector together or not at all, one sum of masks, then no seed."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ntkfl.crypto.masking import mask, sum_masks, unpack_words
from ntkfl.crypto.row_frames import BatchKey
from ntkfl.errors import Refused
from ntkfl.services.shuffler.store import BatchStore
from tests.services.shuffler.batches import DIGEST, KEY, NAMES, batch, on_disk, refusal, said

NUMBERS = 5
ROW_BYTES = 4 * NUMBERS + 48
SIZES = {"max_rows": 1, "row_bytes": ROW_BYTES, "numbers": NUMBERS}
SEEDS = {name: bytes([i + 1]) * 32 for i, name in enumerate(NAMES)}


def row_of(client: str) -> bytes:
    return client.encode().ljust(ROW_BYTES, b".")


def opened(path: Path | None = None, key: BatchKey = KEY, **terms: int) -> BatchStore:
    shuffler = BatchStore(path)
    shuffler.open(batch(key, **(SIZES | terms)), DIGEST)
    return shuffler


def submit(shuffler: BatchStore, *clients: str, key: BatchKey = KEY) -> None:
    for client in clients:
        shuffler.submit(client, said(key), [row_of(client)], SEEDS[client])


def masks(shuffler: BatchStore, key: BatchKey = KEY) -> list[int]:
    return [int(word) for word in unpack_words(shuffler.masks(key), NUMBERS)]


def expected(*clients: str, key: BatchKey = KEY) -> list[int]:
    return [int(word) for word in sum_masks([SEEDS[client] for client in clients], said(key), NUMBERS)]


def test_the_masks_are_those_of_exactly_the_released_clients() -> None:
    shuffler = opened()
    submit(shuffler, "ada", "cyd", "dan")
    with refusal("not-ready"):
        shuffler.masks(KEY)
    assert sorted(shuffler.release(KEY)) == [row_of(name) for name in ("ada", "cyd", "dan")]
    assert masks(shuffler) == expected("ada", "cyd", "dan")
    assert masks(shuffler) == expected("ada", "cyd", "dan")  # asked again, the same
    with refusal("late"):
        submit(shuffler, "bob")
    shuffler.release(KEY)
    assert masks(shuffler) == expected("ada", "cyd", "dan")
    shuffler.forget(KEY)
    with refusal("forgotten"):
        shuffler.masks(KEY)
    with refusal("forgotten"):
        shuffler.release(KEY)


def test_a_batch_takes_rows_or_masked_vectors_never_both() -> None:
    """A seed among rows would be released with them; rows in a sum would have no mask."""
    sums, rows = opened(), BatchStore()
    rows.open(batch(max_rows=1, row_bytes=ROW_BYTES), DIGEST)
    with refusal("other-kind"):
        sums.submit("ada", said(), [row_of("ada")])
    with refusal("other-kind"):
        submit(rows, "ada")
    with refusal("other-kind"):
        rows.masks(KEY)
    for seed in (b"", bytes(31), bytes(33)):
        with refusal("malformed"):
            sums.submit("ada", said(), [row_of("ada")], seed)
    assert sums.status(KEY).clients == rows.status(KEY).clients == 0


def test_a_cancelled_batch_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    for when in ("before", "after"):
        key = BatchKey(1 if when == "before" else 2, 0)
        shuffler = opened(path, key)
        submit(shuffler, "ada", "bob", key=key)
        if when == "after":
            shuffler.release(key)
            total = shuffler.masks(key)
            assert total in on_disk(path)
        assert (SEEDS["ada"] in on_disk(path)) == (when == "before")
        shuffler.cancel(key)
        with pytest.raises(Refused):
            shuffler.masks(key)
        assert SEEDS["ada"] not in on_disk(path)
        shuffler.close()
    assert total not in on_disk(path)


def test_no_seed_is_in_the_file_after_the_release(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    shuffler = opened(path)
    submit(shuffler, *NAMES)
    assert all(seed in on_disk(path) for seed in SEEDS.values())  # the search finds them
    shuffler.release(KEY)
    assert not any(seed in on_disk(path) for seed in SEEDS.values())
    assert not any(mask(seed, said(), NUMBERS).tobytes() in on_disk(path) for seed in SEEDS.values())
    shuffler.forget(KEY)
    assert np.array(expected(*NAMES), dtype="<u4").tobytes() not in on_disk(path)


def test_a_lost_seed_stops_the_release(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    shuffler = opened(path)
    submit(shuffler, *NAMES)
    shuffler.close()
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE senders_{KEY.number} SET seed = NULL WHERE client = 'ada'")
    db.close()
    with refusal("storage"):
        BatchStore(path).release(KEY)


KILLED = """
import os, signal, sys
from pathlib import Path
from ntkfl.crypto.row_frames import BatchKey
from ntkfl.services.shuffler.release_log import ReleaseLog
from ntkfl.services.shuffler.store import BatchStore

append = ReleaseLog.append
def killed(*arguments):
    if sys.argv[2] == "released":
        append(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
ReleaseLog.append = killed
BatchStore(Path(sys.argv[1])).release(BatchKey(1, 0))
"""


@pytest.mark.parametrize("state", ["ready", "released"])
def test_a_shuffler_killed_in_the_middle_of_a_release_ends_it_when_it_starts(tmp_path: Path, state: str) -> None:
    """Before the log's line, nothing was released; after it, exactly that is, although the database knew nothing."""
    path = tmp_path / "state.sqlite"
    shuffler = opened(path)
    submit(shuffler, *NAMES)
    shuffler.close()
    died = subprocess.run([sys.executable, "-c", KILLED, str(path), state], capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    shuffler = BatchStore(path)
    assert shuffler.status(KEY).state == state
    assert sorted(shuffler.release(KEY)) == [row_of(name) for name in NAMES]
    assert masks(shuffler) == expected(*NAMES)
    assert not any(seed in on_disk(path) for seed in SEEDS.values())
