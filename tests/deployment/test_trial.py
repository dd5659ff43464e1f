"""`ntkfl deploy try`: a whole federation by one command, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ntkfl.deployment.trial import Role, Trial
from ntkfl.errors import ConfigError

COMMAND = [sys.executable, "-m", "ntkfl", "deploy", "try", "--clients", "2", "--rounds", "2"]


def test_its_folder_is_one_that_goes_on(tmp_path: Path) -> None:
    first = Trial(tmp_path / "trial", clients=2, rounds=3)
    again = Trial(tmp_path / "trial", clients=9, rounds=9)  # what is there decides
    assert again.peers == first.peers
    assert (again.settings.clients, again.settings.rounds) == (2, 3)
    assert sorted(p.name for p in (tmp_path / "trial" / "data").iterdir()) == [
        "client-0.npz",
        "client-1.npz",
        "test.npz",
    ]
    (tmp_path / "trial" / "data" / "test.npz").unlink()
    for path in (tmp_path / "trial" / "data").iterdir():
        path.unlink()
    (tmp_path / "trial" / "data").rmdir()
    with pytest.raises(ConfigError, match="no trial's data"):
        Trial(tmp_path / "trial", clients=2, rounds=3)


def test_a_client_that_ends_is_said_once_and_a_service_ends_the_trial(tmp_path: Path) -> None:
    said: list[str] = []
    trial = Trial(tmp_path / "trial", clients=2, rounds=1, say=said.append)
    (trial.folder / "logs" / "log").write_text("first\nthe reason\n")

    def ended(name: str, code: str) -> Role:
        process = subprocess.Popen([sys.executable, "-c", code])
        process.wait()
        return Role(name, process, trial.folder / "logs" / "log")  # type: ignore[arg-type]

    trial.roles = [ended("client-0", "import os; os.kill(os.getpid(), 9)"), ended("client-1", "")]
    trial.check()
    trial.check()
    assert len(said) == 1  # one that left in order is nobody's news
    assert said[0].startswith("client-0 was killed by signal 9; its log is ")
    assert f"ntkfl join {trial.folder / 'clients' / 'client-0'} --data" in said[0]
    trial.roles = [ended("shuffler", "raise SystemExit(2)")]
    with pytest.raises(ConfigError, match="the shuffler ended with code 2: the reason; its log is"):
        trial.check()
    trial.roles = []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_trial_is_stopped_by_ctrl_c_and_goes_on(tmp_path: Path) -> None:
    """All processes end with the one that started them; the second time the run is trained to its end."""
    process = subprocess.Popen(COMMAND, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    seen = ""
    while "clients at https" not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    started = [int(pid) for pid in re.findall(r"^  \S+ +pid (\d+)", seen, re.MULTILINE)]
    assert len(started) == 2 + 2 + 1
    assert "logs: trial/logs" in seen
    assert f"kill {process.pid}" in seen
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "go on with: ntkfl deploy try trial" in rest
    time.sleep(0.2)
    assert [pid for pid in started if os.path.exists(f"/proc/{pid}")] == []
    done = subprocess.run(COMMAND, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    history = (tmp_path / "trial" / "run" / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["answered"] for line in history] == [2, 2]
    for log in (tmp_path / "trial" / "logs").iterdir():
        assert "Traceback" not in log.read_text()
    logs = {log.stem: log.read_text() for log in (tmp_path / "trial" / "logs").iterdir()}
    assert logs["client-0"].count("answered round") == 2  # a line per round
    assert logs["shuffler"].count("released the rows of 2 of 2 clients") == 2
