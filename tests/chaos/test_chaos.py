"""A slice of `make chaos`: a few kills at random moments. The sweep over every step of writing is left to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
