"""An error in one run of a comparison: said with its place, the others go on."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from ntkfl.cli import app
from ntkfl.compare.trials import Workers
from ntkfl.report.runs import find
from ntkfl.report.view import view

METHOD = """
import os

from ntkfl.methods import FedAvg


def helper(client):
    return os.path.exists("ready") or client.memory["velocity"]


class Broken(FedAvg):
    def answer(self, task, question, client):
        if question.round == 2:
            helper(client)
        return super().answer(task, question, client)
"""
TOML = """
rounds = 3
clients_per_round = 3
seeds = [0, 1]
targets = [0.3]
[data]
dataset = "digits"
clients = 6
[model]
hidden = [4]
[[methods]]
label = "whole"
method = { name = "fedavg", local_steps = 1 }
[[methods]]
label = "broken [a]"
method = { name = "broken_method:Broken", local_steps = 1 }
"""


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Result]]:
    """The command, in a folder with the method above."""
    monkeypatch.setattr("ntkfl.cli.compare.Workers", lambda _, *how: Workers(0, *how))  # in this process
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("broken_method.py").write_text(METHOD)
    Path("c.toml").write_text(TOML)
    yield lambda: CliRunner().invoke(app, ["compare", "c.toml", "--out", "out"])
    sys.modules.pop("broken_method", None)


def test_an_error_is_said_with_its_place_and_tried_again_while_the_others_go_on(compared: Callable[[], Result]) -> None:
    """What the method needs may lie outside of its file, so its cell stays the same."""
    done = compared()
    assert done.exit_code == 1
    last = done.output.partition("2 runs failed")[2]
    assert "✗ broken [a], seed 0; broken [a], seed 1:\n" in last
    why = "KeyError: 'velocity' (broken_method.py, line 8, in helper)"
    assert why in last
    assert "  broken_method.py, line 14, in answer: helper(client)\n" in last
    assert "  broken_method.py, line 8, in helper: return os.path" in last
    assert "local_training.py" not in last  # frames of the library help nobody here
    whole, broken = json.loads(Path("out/results.json").read_text())["rows"]
    assert [len(curve) for curve in whole["accuracy"]] == [3, 3]
    assert [len(curve) for curve in broken["accuracy"]] == [1, 1]
    assert broken["failed"] == [why] * 2
    assert re.search(r"\| broken \[a\] \|.*\| failed \|", Path("out/table.md").read_text())
    shown = {run.name: view(run) for run in find([Path("out")])}
    assert shown["whole, seed 0"]["condition"] == "finished"
    assert shown["broken [a], seed 0"]["condition"] == "failed"
    assert "failed after 1 of 3 rounds: KeyError" in shown["broken [a], seed 0"]["text"]

    Path("ready").touch()
    again = compared()
    assert again.exit_code == 0, again.output
    assert "failed" not in again.output
    assert not list(Path().rglob("*.error.txt"))
    rows = json.loads(Path("out/results.json").read_text())["rows"]
    assert [len(curve) for row in rows for curve in row["accuracy"]] == [3] * 4
