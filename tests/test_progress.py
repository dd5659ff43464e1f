"""Progress: the time left by hand, what a terminal shows, and what a log gets to read."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ntkfl.federation.simulation import Progress
from ntkfl.progress import ProgressBar, span


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def rounds(progress: Progress, clock: Clock, numbers: Iterable[int], total: int) -> None:
    progress.on_begin(total)
    for number in numbers:
        clock.now += 4
        progress.on_round({"round": number, "test_accuracy": number / 100, "test_loss": 1.0}, {"seconds": 4.0})
    progress.on_end()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("ntkfl.progress.monotonic", clock)
    return clock


def test_a_log_that_was_asked_for_gets_a_line_now_and_then_and_the_last(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress()
    rounds(progress, clock, range(1, 8), 20)
    assert capsys.readouterr().err.splitlines() == [
        "round 3 of 20, test accuracy 3.0 %  (15 %, 1:08 min left)",
        "round 6 of 20, test accuracy 6.0 %  (30 %, 56 s left)",
        "round 7 of 20, test accuracy 7.0 %",
    ]
    rounds(Progress(log=False), clock, range(1, 21), 20)
    assert capsys.readouterr() == ("", "")
    rounds(
        progress, clock, range(11, 15), 20
    )  # used again, for a run that is resumed: its pace is that of its own rounds
    assert capsys.readouterr().err.splitlines()[0].endswith("(65 %, 28 s left)")


def test_the_time_left_follows_from_the_pace(clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    with ProgressBar(10) as bar:
        bar.begin("first")
        clock.now += 30
        bar.begin("second")  # so the first has ended: 1 of 10 in 30 s
        clock.now += 20
        bar.end("second done")  # 2 of 10 in 50 s
        bar.end(pieces=7)
        assert bar.how_far() == "90 %, 6 s left"
        bar.end(pieces=4)  # never beyond the end
        assert bar.how_far() == "100 %, 0 s left"
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == ["first  (0 %)", "second  (10 %, 4:30 min left)", "second done  (20 %, 3:20 min left)"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (60, "1:00 min"), (3599, "59:59 min"), (3720, "1:02 h")]
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text
