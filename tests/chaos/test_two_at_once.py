"""Two processes that want one folder: the second is told, and the first goes on."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ntkfl.federation.run_folder import RunFolder
from tests.chaos.comparison import CONFIG, command
from tests.chaos.storm import DATA
from tests.fork_server import Child, run

pytestmark = pytest.mark.timeout(900)  # four commands, each of which imports torch, beside whatever else runs
TRAIN = ["-m", "ntkfl", "train", *DATA, "--set", "steps=[10,100]"]


def until(there: Callable[[], bool], process: subprocess.Popen[str] | Child) -> None:
    for _ in range(6000):
        if there():
            return
        assert process.poll() is None, "it has ended"
        time.sleep(0.02)
    raise AssertionError("did not begin")


def refused(arguments: Sequence[str]) -> str:
    second = run(*arguments, timeout=240)
    assert second.returncode == 2, second
    assert len(second.stderr.splitlines()) == 1
    return second.stderr


def test_a_second_training_on_a_runs_folder_is_refused(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "run")]
    with open(tmp_path / "log", "wb") as sink:
        first = Child([*TRAIN, "--rounds", "100000", *out], sink.fileno(), sink.fileno())
    try:
        until((tmp_path / "run/checkpoint/state.safetensors").exists, first)
        assert "is in use by another process" in refused([*TRAIN[:3], "--resume", *out])
        assert "is in use by another process" in refused([*TRAIN, "--rounds", "2", *out])
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGKILL)


@pytest.mark.long
def test_a_second_comparison_in_a_folder_is_refused_and_a_killed_one_leaves_nobody_behind(tmp_path: Path) -> None:
    words = command(tmp_path, tmp_path / "out")
    (tmp_path / "storm.toml").write_text(CONFIG.replace("rounds = 25", "rounds = 100000"))
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as first:
        try:
            until(lambda: any(tmp_path.glob("out/cells/*/history.jsonl")), first)
            assert "is in use by another process" in refused(words[1:])
            assert first.poll() is None
        finally:
            first.send_signal(signal.SIGKILL)
    cells = [RunFolder(path.parent) for path in tmp_path.glob("out/cells/*/config.toml")]
    assert cells
    for _ in range(500):  # its workers see that it is gone, and let go of their runs
        if not any(cell.in_use for cell in cells):
            return
        time.sleep(0.02)
    raise AssertionError("a worker goes on without its comparison")
