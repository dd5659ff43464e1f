"""The wait for a batch, at a shuffler's own state: when it ends, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ntkfl.crypto.row_frames import BatchKey
from ntkfl.deployment import waiting
from ntkfl.deployment.contract import Deployment
from ntkfl.services.shuffler.store import Shuffler
from tests.services.shuffler.batches import DIGEST, KEY, NAMES, Clock, batch, submit_all

SETTINGS: dict[str, Any] = {"inputs": (64,), "outputs": 10, "clients": 4, "clients_per_round": 4, "round_seconds": 1}
LATER = BatchKey(1, 1)


def wait(
    shuffler: Shuffler,
    key: BatchKey = KEY,
    patience: float = 60,
    say: Callable[[str], None] = lambda line: None,
) -> waiting.Waited:
    settings = Deployment(**SETTINGS, patience=patience)
    return waiting.wait_for_batch(shuffler, key, 4, settings, say, 7)  # type: ignore[arg-type]


def test_it_ends_when_all_have_answered() -> None:
    shuffler = Shuffler()
    shuffler.open(batch(seconds=60.0), DIGEST)
    submit_all(shuffler)
    waited = wait(shuffler)
    assert (waited.ready, waited.status.clients, waited.silent) == (True, 4, 0)
    assert waited.seconds < 30  # long before the deadline


def test_a_first_exchange_ends_at_its_deadline_with_those_that_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shuffler's clock passes the deadline when the wait is said."""
    monkeypatch.setattr(waiting, "SAY_S", 0.1)
    clock, said = Clock(), list[str]()
    shuffler = Shuffler(clock=clock)
    shuffler.open(batch(seconds=30.0), DIGEST)
    submit_all(shuffler, names=NAMES[:3])

    def say(line: str) -> None:
        said.append(line)
        clock.now += 30

    waited = wait(shuffler, say=say)
    assert (waited.ready, waited.status.clients) == (True, 3)
    assert 0.1 < waited.silent <= waited.seconds
    assert said == ["round 7: 3 of 4 clients have answered; waits for 1 more, 30 s at most"]


def test_too_few_are_waited_for_as_long_as_patience_says() -> None:
    shuffler = Shuffler()
    shuffler.open(batch(seconds=0.1, min_clients=4), DIGEST)
    submit_all(shuffler, names=NAMES[:3])
    waited = wait(shuffler, patience=0.2)
    assert (waited.ready, waited.status.state, waited.status.clients) == (False, "open", 3)
    assert waited.seconds >= SETTINGS["round_seconds"] + 0.2


def test_a_later_exchange_ends_at_its_deadline_and_names_who_is_missing() -> None:
    shuffler = Shuffler()
    shuffler.open(batch(), DIGEST)
    submit_all(shuffler)
    shuffler.release(KEY)
    shuffler.open(batch(LATER, seconds=0.2), DIGEST)
    submit_all(shuffler, LATER, NAMES[:3])
    waited = wait(shuffler, LATER)
    assert (waited.ready, waited.status.missing) == (False, ("dan",))
    assert waited.seconds < 30  # patience is not for it


def test_a_batch_that_was_cancelled_is_not_waited_for() -> None:
    shuffler = Shuffler()
    shuffler.open(batch(), DIGEST)
    shuffler.cancel(KEY)
    waited = wait(shuffler)
    assert (waited.ready, waited.status.state) == (False, "cancelled")
