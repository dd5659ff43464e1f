"""Clients that do not answer: when they are no longer waited for, and that nothing else changes by that."""

from __future__ import annotations

from ntkfl.crypto.row_frames import BatchKey
from ntkfl.services.shuffler.store import Shuffler
from tests.services.shuffler.batches import DIGEST, NAMES, Clock, batch, rows_of, said, submit_all

THREE = NAMES[:3]


def missed(shuffler: Shuffler, clock: Clock, round: int) -> None:
    """A round whose deadline passes without the answer of the last client."""
    key = BatchKey(round, 0)
    shuffler.open(batch(key, seconds=10.0), DIGEST)
    submit_all(shuffler, key, THREE)
    clock.now += 11
    assert shuffler.release(key)


def test_the_third_round_does_not_wait_for_a_client_that_missed_two() -> None:
    clock = Clock()
    shuffler = Shuffler(clock=clock)
    missed(shuffler, clock, 1)
    shuffler.open(batch(BatchKey(2, 0), seconds=10.0), DIGEST)
    submit_all(shuffler, BatchKey(2, 0), THREE)
    assert shuffler.status(BatchKey(2, 0)).state == "open"  # one draw may be missed
    clock.now += 11
    shuffler.release(BatchKey(2, 0))
    key = BatchKey(3, 0)
    shuffler.open(batch(key, seconds=10.0), DIGEST)
    submit_all(shuffler, key, THREE[:2])
    assert shuffler.status(key).state == "open"  # the others are waited for as ever
    submit_all(shuffler, key, THREE[2:])
    status = shuffler.status(key)
    assert (status.state, status.clients, status.seconds) == ("ready", 3, 10.0)
    shuffler.presence.called(NAMES[3])
    assert shuffler.status(key).state == "open"  # it is there again, and its answer may come
    shuffler.submit(NAMES[3], said(key), rows_of(NAMES[3]))
    assert len(shuffler.release(key)) == 8
