"""`ntkfl deploy try`: a whole federation by one command, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

STATUS = [sys.executable, "-m", "ntkfl", "deploy", "status", "trial"]
COMMAND = [sys.executable, "-m", "ntkfl", "deploy", "try", "--clients", "2", "--rounds", "2"]


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
    assert len(started) == 2 + 2 + 1 + 1
    assert re.search(r"aggregator +pid \d+ +trial/logs/aggregator.log", seen)
    assert f"kill {process.pid}" in seen
    early = subprocess.run(STATUS, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert early.returncode == 0, early.stdout  # before the first round: roles that start are no problem
    assert re.search("runs, pid .*: (waits|training)", early.stdout)
    served = re.findall(r"metrics of the (\S+): (http://127.0.0.1:\d+)/metrics", seen)
    assert [name for name, _ in served] == ["key-server", "shuffler", "aggregator"]
    for _, address in served:
        with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
            assert b"ntkfl_info" in answer.read()
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "go on with: ntkfl deploy try trial" in rest
    parts = subprocess.run(STATUS, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert parts.returncode == 0, parts.stdout
    assert parts.stdout.count("by SIGTERM") == 6, parts.stdout  # every role was stopped, and says so
    assert "stopped by SIGTERM; the same command takes part" in (tmp_path / "trial/logs/client-0.log").read_text()
    assert [pid for pid in started if os.path.exists(f"/proc/{pid}")] == []
    done = subprocess.run(COMMAND, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    history = (tmp_path / "trial" / "run" / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["answered"] for line in history] == [2, 2]
    for log in (tmp_path / "trial" / "logs").iterdir():
        assert "Traceback" not in log.read_text()
    logs = {log.stem: log.read_text() for log in (tmp_path / "trial" / "logs").iterdir()}
    for role, line in (
        ("client-0", r"answered round (\d+)"),
        ("shuffler", r"round (\d+): released the rows of 2 of 2"),
    ):
        said = re.findall(line, logs[role])  # a line per round of the protocol, also of one that Ctrl-C cut short
        assert len(said) == len(set(said)) >= 2, logs[role]
    assert re.search(r"the run has ended; answered \d questions? since", logs["client-0"].splitlines()[-1])
    once = subprocess.run(COMMAND, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (once.returncode, once.stdout) == (2, "")
    assert "has ended: see it with: ntkfl report trial/run" in once.stderr
