"""A batch's deadline is a length of time: nobody who sets the machine's clock moves it."""

from __future__ import annotations

import pytest

from ntkfl.services.shuffler import store as shuffling
from ntkfl.services.shuffler.store import BatchStore
from tests.services.shuffler.batches import DIGEST, KEY, batch

SECONDS = 100.0
DAY = 86_400.0


class Clocks:
    """The machine's two: what its owner sets, and what has passed."""

    def __init__(self) -> None:
        self.wall, self.passed = 1.8e9, 5000.0

    def wait(self, seconds: float) -> None:
        self.wall += seconds
        self.passed += seconds

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.passed


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(shuffling, "time", made)
    return made


def left(shuffler: BatchStore) -> float:
    seconds = shuffler.status(KEY).seconds
    assert seconds is not None
    return seconds


@pytest.mark.parametrize("jump", [-DAY, -1.0, 1.0, DAY])
def test_setting_the_clock_moves_no_deadline(clocks: Clocks, jump: float) -> None:
    shuffler = BatchStore()
    shuffler.open(batch(seconds=SECONDS), DIGEST)
    clocks.wait(30)
    clocks.wall += jump
    assert left(shuffler) == pytest.approx(70)
    clocks.wait(71)
    assert left(shuffler) == 0
