"""`ntkfl train` as its user runs it: real processes, real folders."""

from __future__ import annotations

import io
import json
import signal
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest

from ntkfl.cli import main
from tests.fork_server import Child, run

SMALL = ["--method", "ntk-fl", "--dataset", "digits", "--clients", "30", "--clients-per-round", "4"]
SMALL += ["--set", "hidden=[12]", "--set", "steps=[50,400]"]


class Finished(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def ntkfl(*arguments: str | Path) -> Finished:
    """The command as its entry point runs it, in this process: what `python -m ntkfl` adds is tested below."""
    out, err = io.StringIO(), io.StringIO()
    with patch.object(sys, "argv", ["ntkfl", *map(str, arguments)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as leaving:
            return Finished(int(leaving.code or 0), out.getvalue(), err.getvalue())
    return Finished(0, out.getvalue(), err.getvalue())


def test_a_run_leaves_its_folder_and_repeats_from_it(tmp_path: Path) -> None:
    first = ntkfl("train", *SMALL, "--rounds", "3", "--seed", "4", "--out", tmp_path / "a")
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    where = "digits, 30 clients (Dirichlet α = 0.1), 4 per round, mlp with 12 hidden units"
    assert lines[0] == f"{where}, ntk-fl: steps 50 400"
    assert lines[1] == "ntk-fl sends rows that contain the inputs: for people's data see --private"
    assert lines[2].split()[:2] == ["round", "accuracy"]
    assert [line.split()[0] for line in lines[3:6]] == ["1", "2", "3"]
    assert all(len(line) <= 80 for line in lines[1:-1])
    files = {p.name for p in (tmp_path / "a").iterdir()} - {".lock"}
    written = {"config.toml", "history.jsonl", "timings.jsonl", "model.safetensors", "checkpoint"}
    assert files == written

    again = ntkfl("train", "--config", tmp_path / "a/config.toml", "--out", tmp_path / "b")
    assert again.returncode == 0, again.stderr
    for file in ("config.toml", "history.jsonl", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in a process of its own, as those below: here torch was told its number of threads."""
    folder = tmp_path_factory.mktemp("train") / "whole"
    assert run("-m", "ntkfl", "train", *SMALL, "--rounds", "8", "--out", folder).returncode == 0
    return folder


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopped_and_resumed_equals_undisturbed(how: signal.Signals, undisturbed: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "wb") as sink:
        training = Child(
            ["-m", "ntkfl", "train", *SMALL, "--rounds", "8", "--out", tmp_path / "cut"], sink.fileno(), sink.fileno()
        )
    history = tmp_path / "cut/history.jsonl"
    for _ in range(3000):
        if history.exists() and history.read_text().count("\n") >= 2:
            break
        time.sleep(0.01)
    training.send_signal(how)
    if training.wait(60) != 0 and how == signal.SIGINT:  # it may have finished in the meantime
        assert training.returncode == 130
        assert "continue with: ntkfl train --resume --out" in log.read_text()
    assert run("-m", "ntkfl", "train", "--resume", "--out", tmp_path / "cut").returncode == 0
    for file in ("history.jsonl", "model.safetensors", "checkpoint/state.safetensors"):
        assert (tmp_path / "cut" / file).read_bytes() == (undisturbed / file).read_bytes()


def test_a_damaged_checkpoint_is_left_as_it_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert ntkfl("train", *SMALL, "--rounds", "2", "--out", run).returncode == 0
    checkpoint = run / "checkpoint/state.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-9])
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    finished = ntkfl("train", "--resume", "--rounds", "3", "--out", run)
    assert finished.returncode == 2
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    assert "cut short or damaged" in finished.stderr
    assert len(finished.stderr.strip().splitlines()) == 1


def test_none_is_a_value_on_the_command_line_and_in_the_file_that_repeats_the_run(tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    given = ["--method", "sum-ntk-fl", "--set", "time=none", "--set", "stop_at=none", "--set", "gain=none"]
    few = ["--dataset", "digits", "--clients", "3", "--clients-per-round", "2"]
    small = [*few, "--rounds", "1", "--set", "hidden=[4]"]
    for arguments in ([*small, *given, "--out", first], ["--config", first / "config.toml", "--out", again]):
        made = ntkfl("train", *arguments)
        assert made.returncode == 0, made.stderr
    assert 'time = "none"' in (first / "config.toml").read_text()
    for name in ("config.toml", "history.jsonl"):
        assert (again / name).read_bytes() == (first / name).read_bytes()
    resumed = ntkfl("train", "--resume", "--rounds", "2", "--out", first)
    assert resumed.returncode == 0, resumed.stderr
    assert 'time = "none"' in (first / "config.toml").read_text()


def test_secure_sums_from_the_command_line() -> None:
    few = ["--dataset", "digits", "--clients", "6", "--clients-per-round", "3"]
    small = ["train", *few, "--set", "hidden=[4]", "--json"]
    done = ntkfl(*small, "--rounds", "1", "--method", "fedavg", "--secure-sum")
    assert done.returncode == 0, done.stderr
    (record,) = map(json.loads, done.stdout.splitlines())
    assert (record["summed_clients"], record["bounded_clients"]) == (3, 0)


OWN = """
import torch
from torch import nn

from ntkfl.methods import FedAvg


class Shape(FedAvg):
    def answer(self, task, question, client):
        return super().answer(task, question, self.turned(client))

    def turned(self, client):
        client.x = client.x @ torch.ones(3, 3)
        return client


def network(inputs, outputs):
    return Bad()


class Bad(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 10)

    def forward(self, x):
        return self.layer(x.flatten(1))
"""


@pytest.mark.parametrize(
    ("given", "code", "said", "frames"),
    [
        (
            ["--method", "own_code:Shape"],
            1,
            "ntkfl: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
            ["line 10, in answer", "line 13, in turned: client.x = client.x @"],
        ),
        (["--method", "fedavg", "--model", "own_code:network"], 2, "the model fails on", ["line 27, in forward: ret"]),
    ],
)
def test_an_error_in_ones_own_code_is_told_with_its_lines(
    given: list[str], code: int, said: str, frames: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_code.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    words = ["train", "--dataset", "digits", "--clients", "4", "--rounds", "1", *given]
    finished = ntkfl(*words)
    first, *rest = finished.stderr[finished.stderr.index("ntkfl: ") :].splitlines()
    assert (finished.returncode, said in first) == (code, True), finished.stderr
    places = [line.strip() for line in rest if "traceback" not in line]
    assert len(places) == len(frames)
    for place, frame in zip(places, frames, strict=True):
        assert place.startswith(f"own_code.py, {frame}")
    if code == 1:
        assert rest[-1].strip() == "for the whole traceback: NTKFL_TRACEBACK=1"
        monkeypatch.setenv("NTKFL_TRACEBACK", "1")
        with pytest.raises(RuntimeError):
            ntkfl(*words)
