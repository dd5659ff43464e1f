"""Progress: the time left by hand, what a terminal shows, and what a log gets to read."""

from __future__ import annotations

import io
import sys

import pytest

import ntkfl
from ntkfl.federation.callbacks import Functions, Progress
from ntkfl.progress import ProgressBar, clock, span


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def begun(log: bool, clock: Clock, rounds: int) -> Progress:
    line = Progress(log)
    line._clock = clock
    line.on_begin(rounds)
    return line


def rounds(line: Progress, clock: Clock, count: int) -> None:
    for number in range(1, count + 1):
        clock.now += 4
        line.on_round({"round": number, "test_accuracy": number / 100, "test_loss": 1.0}, {"seconds": 4.0})
    line.on_end()


def test_a_log_that_was_asked_for_gets_a_line_now_and_then_and_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    rounds(begun(True, clock, 20), clock, 7)
    assert capsys.readouterr().err.splitlines() == [
        "round 3 of 20, test accuracy 3.0 %, 12 s, 1:08 min left",
        "round 6 of 20, test accuracy 6.0 %, 24 s, 56 s left",
        "round 7 of 20, test accuracy 7.0 %, 28 s",
    ]


def test_a_log_that_was_not_asked_for_gets_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    rounds(begun(False, clock, 20), clock, 20)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_one_line_that_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, screen = Clock(), Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "60")
    rounds(begun(False, clock, 2), clock, 2)
    first, *shown = screen.getvalue().split("\r")
    assert first == ""
    assert all(len(text.rstrip("\n")) == 59 for text in shown)  # each covers the one before it
    assert [text.rstrip() for text in shown] == [
        "training, 2 rounds",
        "round 1 of 2, test accuracy 1.0 %, 4 s, 4 s left",
        "round 2 of 2, test accuracy 2.0 %, 8 s, 0 s left",
        "round 2 of 2, test accuracy 2.0 %, 8 s",
    ]
    assert screen.getvalue().count("\n") == 1


def test_train_shows_rounds_in_a_terminal_unless_somebody_watches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=10, alpha=1.0), seed=0)

    def shown(**options: object) -> str:
        screen = Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        method = ntkfl.methods.FedAvg(local_steps=1)
        ntkfl.train(ntkfl.models.mlp(64, 4, 10), fed, method, rounds=2, clients_per_round=2, **options)  # type: ignore[arg-type]
        return screen.getvalue()

    heard: list[int] = []
    assert "round 2 of 2, test accuracy" in shown()
    listener = Functions(on_round=lambda record, timing: heard.append(record["round"]))
    assert shown(callbacks=[listener]) == ""
    assert shown(callbacks=[]) == ""
    told = shown(callbacks=[Progress(), listener])
    assert "round 1 of 2" in told
    assert heard == [1, 2, 1, 2]


def test_the_time_left_of_a_resumed_run_counts_the_rounds_that_were_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of 4 s, from the fifth of ten on: 20 s are left after it, whatever the first four took."""
    clock, screen = Clock(), Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    line = begun(True, clock, 10)
    clock.now += 4
    line.on_round({"round": 5, "test_accuracy": 0.5, "test_loss": 1.0}, {"seconds": 4.0})
    assert "round 5 of 10, test accuracy 50.0 %, 4 s, 20 s left" in screen.getvalue()
    clock.now += 8
    line.on_round({"round": 6, "test_accuracy": None, "test_loss": 0.25}, {"seconds": 8.0})
    assert "round 6 of 10, test loss 0.25, 12 s, 24 s left" in screen.getvalue()


def test_the_time_left_follows_from_the_pace_and_the_worth_of_pieces(capfd: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with ProgressBar(10, clock=clock) as bar:
        bar.begin("first", 2)
        assert bar.left() is None
        clock.now += 30
        bar.begin("second", 3)  # so the first has ended: 2 of 10 in 30 s
        assert bar.left() == pytest.approx(120)
        clock.now += 20
        bar.end("second done")  # 5 of 10 in 50 s
        assert bar.left() == pytest.approx(50)
        bar.end(pieces=4)
        assert bar.left() == pytest.approx(50 / 9)
        bar.end(pieces=4)  # never beyond the end
        assert bar.left() == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == ["first  (0 %)", "second  (20 %, 2:00 min left)", "second done  (50 %, 50 s left)"]


def test_a_log_seldom_hears_of_pieces_without_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with ProgressBar(0, "folders", clock=clock) as bar:
        bar.plan(1000)
        for _ in range(100):
            clock.now += 0.3
            bar.end()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2  # in thirty seconds
    assert lines[0].startswith("folders  (3 %, 4:")


def test_quiet_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    with ProgressBar(2, quiet=True) as bar:
        bar.begin("one")
        bar.end("done")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (60, "1:00 min"), (3599, "59:59 min"), (3720, "1:02 h")]
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0:00"), (65, "1:05"), (3599, "59:59"), (3720, "1h02")])
def test_clocks(seconds: float, text: str) -> None:
    assert clock(seconds) == text
