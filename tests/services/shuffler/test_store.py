"""The shuffler's promises: every row once, and no small crowds."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from random import Random

import pytest

from ntkfl.crypto.row_frames import BatchKey
from ntkfl.services.shuffler.store import BatchStore
from tests.services.shuffler.batches import DIGEST, KEY, NAMES, batch, refusal, rows_of, said, submit_all, taken


@pytest.mark.parametrize("terms", [{"clients": 1}, {"max_rows": 0}, {"row_bytes": 0}, {"min_clients": 5}])
def test_terms_that_make_no_batch_are_refused(terms: dict[str, int]) -> None:
    with refusal("terms"):
        BatchStore().open(batch(KEY, **terms), DIGEST)


def test_no_more_clients_answer_than_were_asked() -> None:
    """A secure sum has room for the clients it was opened for, and no more."""
    shuffler = BatchStore()
    shuffler.open(batch(clients=3), DIGEST)
    submit_all(shuffler, names=NAMES[:3])
    with refusal("not-asked"):
        submit_all(shuffler, names=NAMES[3:])
    assert len(shuffler.release(KEY)) == 6


def test_a_released_batch_is_read_in_pieces_of_any_size() -> None:
    shuffler = BatchStore()
    shuffler.open(batch(), DIGEST)
    with refusal("not-ready"):
        shuffler.released(KEY, 0, 1)
    sent = submit_all(shuffler)
    count = len(sent)
    assert shuffler.permute(KEY).rows == count
    whole = shuffler.release(KEY)
    for some in (1, 3, count, count + 5):
        assert [row for first in range(0, count, some) for row in shuffler.released(KEY, first, some)] == whole
    shuffler.forget(KEY)
    with refusal("forgotten"):
        shuffler.released(KEY, 0, 1)


def test_every_order_is_as_likely_as_any_other() -> None:
    shuffler, seen, trials = BatchStore(random=Random(7)), Counter[tuple[bytes, ...]](), 2400
    for trial in range(trials):
        key = BatchKey(trial, 0)
        shuffler.open(batch(key, 2), DIGEST)
        shuffler.submit("ada", said(key), [b"aaaaaaa1", b"aaaaaaa2"])
        shuffler.submit("bob", said(key), [b"bbbbbbb1", b"bbbbbbb2"])
        seen[tuple(shuffler.release(key))] += 1
        shuffler.forget(key)
    assert set(seen) == set(permutations([b"aaaaaaa1", b"aaaaaaa2", b"bbbbbbb1", b"bbbbbbb2"]))
    expected = trials / 24
    chi_square = sum((count - expected) ** 2 / expected for count in seen.values())
    assert 9.3 < chi_square < 49.7  # 23 degrees of freedom: 0.5 % outside on the low side, 0.1 % on the high side


def test_the_generator_is_the_operating_systems() -> None:
    """Two shufflers in one state, fed the same: seeded alike they agree, as made by default they do not."""

    def order(**options: Random) -> list[bytes]:
        shuffler = BatchStore(**options)  # type: ignore[arg-type]
        shuffler.open(batch(max_rows=40), DIGEST)
        for name in NAMES:
            shuffler.submit(name, said(KEY), rows_of(name, 40))
        return shuffler.release(KEY)

    assert order(random=Random(1)) == order(random=Random(1))
    assert order() != order()


# -- The exchanges of a round

LATER = BatchKey(1, 1)


def begun(names: tuple[str, ...] = NAMES) -> BatchStore:
    """A round whose first exchange these clients answered, and which was released."""
    shuffler = BatchStore()
    shuffler.open(batch(), DIGEST)
    submit_all(shuffler, names=names)
    shuffler.release(KEY)
    shuffler.forget(KEY)
    return shuffler


def test_a_client_revoked_between_two_exchanges_ends_the_round() -> None:
    shuffler = begun()
    shuffler.open(batch(LATER), DIGEST, revoked=["bob"])
    with refusal("revoked"):
        shuffler.submit("bob", said(LATER), rows_of("bob"))
    submit_all(shuffler, LATER, ("ada", "cyd", "dan"))
    with refusal("not-ready"):
        shuffler.release(LATER)


def test_threads_may_all_submit_at_once(tmp_path: Path) -> None:
    names = tuple(f"client-{i}" for i in range(24))
    shuffler = BatchStore(tmp_path / "state.sqlite")
    shuffler.open(batch(clients=len(names), max_rows=5, row_bytes=16), DIGEST)
    start = threading.Barrier(8)

    def attempt(number: int) -> bool:
        """Each client's rows are sent by four threads; one of them gets through."""
        if number < 8:
            start.wait(10)
        name = names[number % len(names)]
        return taken(shuffler, name, KEY, rows_of(name, 5, 16))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(4 * len(names)))) == len(names)
    assert Counter(shuffler.release(KEY)) == Counter(row for name in names for row in rows_of(name, 5, 16))
