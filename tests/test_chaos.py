"""Killed at any moment, or out of room on the disk: a run's folder is whole, and the run goes on to the same bytes."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ntkfl.atomic import replacing, write_private
from ntkfl.errors import NTKFLError
from ntkfl.federation.run_folder import RunFolder
from ntkfl.report.page import write_report
from ntkfl.report.runs import find
from ntkfl.report.view import view
from tests.fork_server import Child, run

DATA = ["--dataset", "digits", "--clients", "12", "--clients-per-round", "3", "--rounds", "2"]
DATA += ["--set", "model.hidden=[8]"]
METHODS = {
    "scaffold": [*DATA, "--method", "scaffold", "--set", "local_steps=3"],  # its clients keep something between rounds
    "cp-ntk-fl": [*DATA, "--method", "cp-ntk-fl", "--set", "steps=[10.0, 100.0]", "--set", "projected_dim=16"],
}
RESULTS = ("config.toml", "history.jsonl", "model.safetensors", "checkpoint/state.safetensors")
COMPARISON = """
name = "c"
rounds = {rounds}
clients_per_round = 3
seeds = [0, 1]
targets = [0.5]
show_rounds = [1]
data = {{ dataset = "digits", clients = 12 }}
model = {{ hidden = [8] }}
[[methods]]
label = "SCAFFOLD"
method = {{ name = "scaffold", local_steps = 3 }}
"""


def train(out: Path, *arguments: str, step: int = 0) -> int:
    """`ntkfl train`, killed at its `step`-th touch of `out`; 0: left alone. The exit code."""
    with open(out.with_suffix(".log"), "wb") as log:
        words = [Path(__file__).with_name("die_at.py"), str(step), "train", *arguments, "--out", str(out)]
        child = Child(words, log.fileno(), log.fileno())
        try:
            return child.wait(200)
        finally:
            child.send_signal(signal.SIGKILL)


def results(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in RESULTS}


def check_whole(folder: Path) -> None:
    """Read all of a run's folder as others do meanwhile."""
    run = RunFolder(folder)
    if run.holds_run:
        run.config()
        assert len(run.records()) >= run.load_checkpoint()[0], "a checkpoint counts a round that the history lacks"
        assert all(view(found)["condition"] != "failed" for found in find([folder]))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the undisturbed run of a method."""
    root, done = tmp_path_factory.mktemp("calm"), set[str]()

    def undisturbed(method: str) -> Path:
        if method not in done:
            assert train(root / method, *METHODS[method]) == 0, (root / f"{method}.log").read_text()
            done.add(method)
        return root / method

    return undisturbed


@pytest.mark.parametrize(
    ("method", "every"),
    [("scaffold", 5), *(pytest.param(method, 1, marks=pytest.mark.long) for method in METHODS)],
)
def test_a_run_killed_at_any_step_and_resumed_ends_with_the_undisturbed_runs_bytes(
    method: str, every: int, calm: Callable[[str], Path], tmp_path: Path
) -> None:
    expected, step, code = results(calm(method)), 2 - every, -signal.SIGKILL
    while code != 0:
        step += every
        out = tmp_path / f"step-{step}"
        code = train(out, *METHODS[method], step=step)
        assert code in (0, -signal.SIGKILL), out.with_suffix(".log").read_text()
        check_whole(out)
        again = ["--resume"] if (out / "config.toml").exists() else METHODS[method]
        assert train(out, *again) == 0, f"after a kill at step {step}: {out.with_suffix('.log').read_text()}"
        assert results(out) == expected, f"after a kill at step {step}"
        assert not list(out.rglob("*.part")), f"after a kill at step {step} something half written is left"
    assert step > 10


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes: what a disk without room does to whoever writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_cannot_be_written_whole_leaves_what_was_there(calm: Callable[[str], Path], tmp_path: Path) -> None:
    run, path, page = RunFolder(calm("scaffold")), tmp_path / "file", tmp_path / "report.html"
    path.write_bytes(b"old")
    write_report([run.path], page)
    good, (done, tensors) = page.read_bytes(), run.load_checkpoint()
    with files_of_at_most(100):
        with pytest.raises(OSError, match="File too large"), replacing(path) as file:
            file.write(bytes(1000))
        with pytest.raises(NTKFLError, match="File too large"):
            write_private(tmp_path / "key", bytes(1000))
        with pytest.raises(NTKFLError, match="File too large"):
            run.save_checkpoint(done + 1, tensors)
        with pytest.raises((NTKFLError, OSError), match="File too large"):
            write_report([run.path], page)
    assert path.read_bytes() == b"old"
    assert page.read_bytes() == good
    assert run.load_checkpoint()[0] == done
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "report.html"]


def test_a_training_without_room_says_so_and_goes_on_once_there_is(calm: Callable[[str], Path], tmp_path: Path) -> None:
    size, out = (calm("scaffold") / "checkpoint/state.safetensors").stat().st_size // 2, tmp_path / "run"

    def confined() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    command = [sys.executable, "-m", "ntkfl", "train", *METHODS["scaffold"], "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, preexec_fn=confined)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "File too large" in line and line.startswith("ntkfl: ")]
    assert "Traceback" not in done.stderr
    assert train(out, "--resume") == 0
    assert results(out) == results(calm("scaffold"))


def until(there: Callable[[], object], process: subprocess.Popen[bytes] | Child) -> None:
    for _ in range(6000):
        if there():
            return
        assert process.poll() is None, "it has ended"
        time.sleep(0.02)
    raise AssertionError("did not begin")


@pytest.mark.timeout(900)
def test_a_second_training_on_a_runs_folder_is_refused(tmp_path: Path) -> None:
    words = ["-m", "ntkfl", "train", *METHODS["scaffold"], "--out", str(tmp_path / "run")]
    with open(tmp_path / "log", "wb") as sink:
        first = Child([*words, "--rounds", "100000"], sink.fileno(), sink.fileno())
    try:
        until((tmp_path / "run/checkpoint/state.safetensors").exists, first)
        for second in (words, [*words[:3], "--resume", *words[-2:]]):
            refused = run(*second, timeout=240)
            assert refused.returncode == 2
            assert "is in use by another process" in refused.stderr
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGKILL)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_comparison_takes_its_workers_with_it_and_goes_on_when_called_again(tmp_path: Path) -> None:
    config, out = tmp_path / "c.toml", tmp_path / "out"
    words = [sys.executable, "-m", "ntkfl", "compare", config, "--workers", "2", "--out", out]
    config.write_text(COMPARISON.format(rounds=100))
    subprocess.run([*words[:-1], tmp_path / "calm"], check=True, capture_output=True, timeout=400)
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        until(lambda: any(out.glob("cells/*/history.jsonl")), child)
        child.kill()
    cells = [RunFolder(path.parent) for path in out.glob("cells/*/config.toml")]
    until(lambda: not any(cell.in_use for cell in cells), subprocess.Popen(["sleep", "60"]))
    subprocess.run(words, check=True, capture_output=True, timeout=400)
    for path in (tmp_path / "calm").glob("cells/*/history.jsonl"):
        assert (out / path.relative_to(tmp_path / "calm")).read_bytes() == path.read_bytes()
