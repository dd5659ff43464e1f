"""Ctrl-C in real processes, in a terminal and in a log: one line, 130, no traceback, nobody left behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.command import UNWANTED, Command, wait_until_gone

SMALL = "--dataset digits --clients 10 --clients-per-round 2 --set hidden=[4] --method fedavg"
COMPARISON = """
name = "stopped"
rounds = 100000
clients_per_round = 3
seeds = [0, 1]
data = {dataset = "digits", clients = 10, alpha = 1.0}
model = {hidden = [4]}
[[methods]]
label = "FedAvg"
method = {name = "fedavg"}
[[methods]]
label = "NTK-FL"
method = {name = "ntk-fl"}
"""


def stop(command: Command, line: str, code: int = 130) -> str:
    """Interrupt it: it ends with one line that says so, and nothing is left of it."""
    before = len(command.text)
    assert command.interrupt() == code, command.text[-2000:]
    said = command.text[before:]
    assert re.search(line, said), command.text[-2000:]
    assert said.count("stopped") == 1
    for unwanted in UNWANTED:
        assert unwanted not in command.text, command.text[-2000:]
    assert not wait_until_gone(command)
    return said


@pytest.mark.parametrize("terminal", [False, True])
def test_training_shows_the_time_left_and_says_how_to_go_on(tmp_path: Path, terminal: bool) -> None:
    out = tmp_path / "run"
    command = Command("train", *SMALL.split(), "--rounds", "100000", "--out", out, terminal=terminal)
    command.until("\n +3 .* \\d+[:h]\\d\\d\\r?\n")
    stop(command, f"stopped after \\d+ whole rounds?; continue with: ntkfl train --resume --out\\s+{out}")


def test_a_comparison_ends_with_its_workers(tmp_path: Path) -> None:
    """From a terminal, which interrupts the workers too; while they work, and while they are being started."""
    (tmp_path / "c.toml").write_text(COMPARISON)
    words = ("compare", tmp_path / "c.toml", "--out", tmp_path / "out", "--workers", "2")
    command = Command(*words, terminal=True)
    command.until("runs to do")
    stop(command, "continue with: ntkfl compare .*c.toml --out")
    command = Command(*words, terminal=True)
    command.until("0 of 4 runs finished")
    stop(command, "finished runs are kept, continue with")
