"""Progress in pieces: the time left by hand, and what a log gets to read."""

from __future__ import annotations

import pytest

from ntkfl.cli.steps import Steps, clock
from ntkfl.progress import span


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_follows_from_the_pace_and_the_worth_of_pieces(capfd: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Steps(10, clock=clock) as steps:
        steps.begin("first", 2)
        assert steps.left() is None
        clock.now += 30
        steps.begin("second", 3)  # so the first has ended: 2 of 10 in 30 s
        assert steps.left() == pytest.approx(120)
        clock.now += 20
        steps.end("second done")  # 5 of 10 in 50 s
        assert steps.left() == pytest.approx(50)
        steps.end(pieces=4)
        assert steps.left() == pytest.approx(50 / 9)
        steps.end(pieces=4)  # never beyond the end
        assert steps.left() == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == ["first  (0 %)", "second  (20 %, 2:00 min left)", "second done  (50 %, 50 s left)"]


def test_a_log_seldom_hears_of_pieces_without_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Steps(0, "folders", clock=clock) as steps:
        steps.plan(1000)
        for _ in range(100):
            clock.now += 0.3
            steps.end()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2  # in thirty seconds
    assert lines[0].startswith("folders  (3 %, 4:")


def test_quiet_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    with Steps(2, quiet=True) as steps:
        steps.begin("one")
        steps.end("done")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (60, "1:00 min"), (3599, "59:59 min"), (3720, "1:02 h")]
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0:00"), (65, "1:05"), (3599, "59:59"), (3720, "1h02")])
def test_clocks(seconds: float, text: str) -> None:
    assert clock(seconds) == text
