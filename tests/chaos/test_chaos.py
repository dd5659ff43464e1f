"""A slice of `make chaos`: a few kills at random moments. The sweep over every step of writing is left to it."""

from __future__ import annotations

import subprocess
import sys
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from tests.chaos import storm

ROOT = Path(__file__).parents[2]


def chaos(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.chaos", "--seed", "1", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


LONG = [pytest.param(method, marks=pytest.mark.long) for method in ("ntk-fl", "cp-ntk-fl")]


@pytest.mark.parametrize("method", ["scaffold", *LONG])  # whose clients keep something between rounds
def test_a_run_killed_and_resumed_ends_with_the_undisturbed_runs_bytes(method: str) -> None:
    said = chaos("--kills", "3", "--only", method)
    assert f"{method}: 76 rounds, killed 3 times" in said
    assert "equal to the last byte" in said


def test_kills_come_sooner_where_rounds_are_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run gets further than twenty rounds between two kills, however fast: it would end before the last of them."""
    (tmp_path / "timings.jsonl").write_text('{"seconds": 9.0}\n' + 4 * '{"seconds": 0.001}\n')
    assert storm.pace(tmp_path) == 0.001
    child = SimpleNamespace(poll=lambda: None, kill=lambda: None, wait=lambda: 0)
    rounds = count()  # one more whenever somebody looks
    for name, value in {"start": lambda *_: child, "look": lambda _: next(rounds), "results": lambda _: {}}.items():
        monkeypatch.setattr(storm, name, value)
    for pace, longest in ((0.001, 0.02), (1.0, 5.0)):
        slept = list[float]()
        monkeypatch.setattr(storm, "time", SimpleNamespace(sleep=slept.append))
        storm.storm("scaffold", 76, 50, pace, tmp_path, tmp_path / "log", Random(0))
        assert len(slept) == 50
        assert longest / 4 < max(slept) <= longest
