"""Secure sums in the shuffler's file: seed and vector together or not at all, one sum of masks, then no seed."""

from __future__ import annotations

import os
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
from ntkfl.services.shuffler.store import Shuffler
from tests.services.shuffler.batches import DIGEST, KEY, NAMES, batch, on_disk, refusal, said

NUMBERS = 5
SIZES = {"max_rows": 1, "row_bytes": 4 * NUMBERS + 48, "numbers": NUMBERS}
SEEDS = {name: bytes([i + 1]) * 32 for i, name in enumerate(NAMES)}


def row_of(client: str) -> bytes:
    return client.encode().ljust(SIZES["row_bytes"], b".")


def opened(path: Path | None = None, key: BatchKey = KEY, **terms: object) -> Shuffler:
    shuffler = Shuffler(path, clock=lambda: 0.0)
    shuffler.open(batch(key, **SIZES | terms), DIGEST)
    return shuffler


def submit(shuffler: Shuffler, *clients: str, key: BatchKey = KEY) -> None:
    for client in clients:
        shuffler.submit(client, said(key), [row_of(client)], SEEDS[client])


def masks(shuffler: Shuffler, key: BatchKey = KEY) -> list[int]:
    return unpack_words(shuffler.masks(key), NUMBERS).tolist()


def expected(*clients: str, key: BatchKey = KEY) -> list[int]:
    return sum_masks([SEEDS[client] for client in clients], said(key), NUMBERS).tolist()


def test_the_masks_are_those_of_exactly_the_released_clients() -> None:
    shuffler = opened(seconds=0)
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


def test_nothing_below_the_floor() -> None:
    shuffler = opened(seconds=0, min_clients=3)
    submit(shuffler, "ada", "bob")
    for ask in (shuffler.release, shuffler.masks):
        with refusal("not-ready"):
            ask(KEY)
    with refusal("below-floor"):
        Shuffler(floor=3).open(batch(**SIZES), DIGEST)


def test_a_batch_takes_rows_or_masked_vectors_never_both() -> None:
    """A seed among rows would be released with them; rows in a sum would have no mask."""
    sums, rows = opened(), Shuffler()
    rows.open(batch(max_rows=1, row_bytes=SIZES["row_bytes"]), DIGEST)
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


@pytest.mark.parametrize(
    "terms", [{"max_rows": 2}, {"numbers": -1}, {"numbers": 1 << 30}, {"numbers": 1000}], ids=lambda terms: str(terms)
)
def test_terms_that_no_sum_can_have(terms: dict[str, int]) -> None:
    with refusal("terms"):
        opened(**terms)


def test_a_client_is_wholly_in_or_wholly_out() -> None:
    """What is refused leaves neither a vector nor a seed: another's row, a second submission, a wrong size."""
    shuffler = opened(seconds=0)
    submit(shuffler, "ada", "bob")
    with refusal("replayed"):
        shuffler.submit("cyd", said(), [row_of("ada")], SEEDS["cyd"])
    with refusal("replayed"):
        shuffler.submit("ada", said(), [row_of("dan")], SEEDS["dan"])
    with refusal("row-size"):
        shuffler.submit("dan", said(), [b"short"], SEEDS["dan"])
    shuffler.release(KEY)
    assert masks(shuffler) == expected("ada", "bob")


def test_a_revoked_client_is_in_no_sum() -> None:
    shuffler = opened()
    submit(shuffler, "ada", "bob", "cyd")
    shuffler.set_revoked(frozenset({"bob"}), 1)
    submit(shuffler, "dan")
    assert len(shuffler.release(KEY)) == 3
    assert masks(shuffler) == expected("ada", "cyd", "dan")


def test_a_cancelled_batch_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    for when in ("before", "after"):
        key = BatchKey(1 if when == "before" else 2, 0)
        shuffler = opened(path, key, seconds=0)
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


def test_a_restart_loses_nothing(tmp_path: Path) -> None:
    """Before the release and after it."""
    path = tmp_path / "state.sqlite"
    shuffler = opened(path)
    submit(shuffler, "ada", "bob")
    shuffler.close()
    shuffler = opened(path)  # opening the same batch again is harmless
    with refusal("replayed"):
        submit(shuffler, "bob")
    submit(shuffler, "cyd", "dan")
    rows = shuffler.release(KEY)
    shuffler.close()
    shuffler = Shuffler(path)
    assert shuffler.release(KEY) == rows
    assert masks(shuffler) == expected(*NAMES)
    shuffler.close()


@pytest.mark.parametrize("damage", ["UPDATE sums SET masks = x'00'", "UPDATE sums SET numbers = 'many'"])
def test_damage_is_said_and_nothing_else_released(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state.sqlite"
    shuffler = opened(path)
    submit(shuffler, *NAMES)
    shuffler.release(KEY)
    shuffler.close()
    with sqlite3.connect(path) as db:
        db.execute(damage)
    db.close()
    with refusal("storage"):
        Shuffler(path).masks(KEY)


def test_a_lost_seed_stops_the_release(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    shuffler = opened(path)
    submit(shuffler, *NAMES)
    shuffler.close()
    with sqlite3.connect(path) as db:
        db.execute(f"DELETE FROM seeds_{KEY.number} WHERE client = 'ada'")
    db.close()
    with refusal("storage"):
        Shuffler(path).release(KEY)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.services.shuffler.test_mask_store import KEY, NAMES, Shuffler, opened, submit
import ntkfl.services.shuffler.store as store

shuffler = opened(Path(sys.argv[1]))
submit(shuffler, *NAMES)
real = store.release_masks
def killed(*arguments):
    real(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
store.release_masks = killed
shuffler.release(KEY)
"""


def test_a_shuffler_killed_in_the_middle_of_a_release_has_not_released(tmp_path: Path) -> None:
    """The seeds are there as before, and the release that follows is the first."""
    path = tmp_path / "state.sqlite"
    died = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=os.environ, timeout=60, check=False)
    assert died.returncode == -signal.SIGKILL
    shuffler = Shuffler(path)
    assert shuffler.status(KEY).state == "ready"
    with refusal("not-ready"):
        shuffler.masks(KEY)
    assert sorted(shuffler.release(KEY)) == [row_of(name) for name in NAMES]
    assert masks(shuffler) == expected(*NAMES)
    assert not any(seed in on_disk(path) for seed in SEEDS.values())
