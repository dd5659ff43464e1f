"""The wait for a batch, at a shuffler's own state: when it ends, and how."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ntkfl.crypto.row_frames import BatchKey
from ntkfl.deployment import waiting
from ntkfl.deployment.contract import Deployment
from ntkfl.services.shuffler.store import Shuffler
from ntkfl.services.status import StatusFile
from tests.services.shuffler.batches import DIGEST, KEY, NAMES, Clock, batch, submit_all

SETTINGS: dict[str, Any] = {"inputs": (64,), "outputs": 10, "clients": 4, "clients_per_round": 4, "round_seconds": 1}
LATER = BatchKey(1, 1)


def wait(
    shuffler: Shuffler,
    folder: Path,
    key: BatchKey = KEY,
    patience: float = 60,
    say: Callable[[str], None] = lambda line: None,
) -> waiting.Waited:
    settings, file = Deployment(**SETTINGS, patience=patience), StatusFile(folder, "aggregator")
    return waiting.wait_for_batch(shuffler, key, 4, settings, file, say, 7)  # type: ignore[arg-type]


def test_it_ends_when_all_have_answered(tmp_path: Path) -> None:
    shuffler = Shuffler()
    shuffler.open(batch(seconds=60.0), DIGEST)
    submit_all(shuffler)
    waited = wait(shuffler, tmp_path)
    assert (waited.ready, waited.status.clients, waited.silent) == (True, 4, 0)
    assert waited.seconds < 30  # long before the deadline
    told = json.loads((tmp_path / "status.json").read_text())
    assert (told["state"], told["key"], told["batch"]["asked"], told["batch"]["answered"]) == ("training", [1, 0], 4, 4)


def test_a_first_exchange_ends_at_its_deadline_with_those_that_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shuffler's clock passes the deadline when the wait is said."""
    monkeypatch.setattr(waiting, "SAY_S", 0.1)
    clock, said = Clock(), list[str]()
    shuffler = Shuffler(clock=clock)
    shuffler.open(batch(seconds=30.0), DIGEST)
    submit_all(shuffler, names=NAMES[:3])

    def say(line: str) -> None:
        said.append(line)
        clock.now += 30

    waited = wait(shuffler, tmp_path, say=say)
    assert (waited.ready, waited.status.clients) == (True, 3)
    assert 0.1 < waited.silent <= waited.seconds
    assert said == ["round 7: 3 of 4 clients have answered; waits for 1 more, 30 s at most"]


def test_too_few_are_waited_for_as_long_as_patience_says(tmp_path: Path) -> None:
    shuffler = Shuffler()
    shuffler.open(batch(seconds=0.1, min_clients=4), DIGEST)
    submit_all(shuffler, names=NAMES[:3])
    waited = wait(shuffler, tmp_path, patience=0.2)
    assert (waited.ready, waited.status.state, waited.status.clients) == (False, "open", 3)
    assert waited.seconds >= SETTINGS["round_seconds"] + 0.2
