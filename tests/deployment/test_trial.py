"""`ntkfl deploy try`: a whole federation by one command, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from ntkfl.deployment import trial as trial_module
from ntkfl.deployment.trial import Role, Trial
from ntkfl.errors import ConfigError
from tests.deployment.federation import free_port

COMMAND = [sys.executable, "-m", "ntkfl", "deploy", "try", "--clients", "2", "--rounds", "2"]


def test_its_folder_is_one_that_goes_on(tmp_path: Path) -> None:
    first = Trial(tmp_path / "trial", clients=2, rounds=3)
    again = Trial(tmp_path / "trial")  # what is there decides
    assert again.peers == first.peers
    assert Trial(tmp_path / "trial", clients=2).settings == first.settings
    with pytest.raises(ConfigError, match="--clients is 2 there, not 9, --rounds is 3 there, not 4; leave them out"):
        Trial(tmp_path / "trial", clients=9, rounds=4)
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


def test_one_that_has_ended_starts_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    trial = Trial(tmp_path / "trial", clients=2, rounds=3)
    trial.out.mkdir()
    (trial.out / "model.safetensors").touch()
    (tmp_path / "trial-2").mkdir()
    with pytest.raises(ConfigError, match=f"has ended: see it with: ntkfl report {trial.out}; begin anew with: .*-3$"):
        Trial(tmp_path / "trial")
    assert not (trial.folder / "logs").exists()


def test_two_at_once_and_a_taken_port_are_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_module, "PORTS", tuple(free_port() for _ in range(3)))
    first, second = Trial(tmp_path / "trial", clients=2), Trial(tmp_path / "trial")
    port = int(first.peers.shuffler.url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)), first:
        with pytest.raises(ConfigError, match=f":{port}: Address already in use; stop what does .* goes on"):
            first.start()
        assert first.roles == []
        with pytest.raises(ConfigError, match=r"another `ntkfl deploy try` runs in .*/trial"):
            second.start()
    second._take()  # the first has ended, and the folder is free
    second.stop()


def test_a_disk_that_is_full_leaves_nothing_half_made(tmp_path: Path) -> None:
    """A limit on the size of files stands for it: keys fit, the clients' data do not."""
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000));"
        "from ntkfl.cli import main; main()"
    )
    command = [sys.executable, "-c", program, "deploy", "try", "--clients", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "trial").write_text("a file")
    with pytest.raises(ConfigError, match="is there already, and holds no trial"):
        Trial(tmp_path / "trial")
    with pytest.raises(ConfigError, match="cannot make the folder"):
        Trial(tmp_path / "nowhere" / "trial")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trial"]


def test_a_client_that_ends_is_said_once_and_a_service_ends_the_trial(tmp_path: Path) -> None:
    said: list[str] = []
    trial = Trial(tmp_path / "trial", clients=2, rounds=1, say=said.append)
    (trial.folder / "logs").mkdir()
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
    assert len(started) == 2 + 2 + 1 + 1
    assert re.search(r"aggregator +pid \d+ +trial/logs/aggregator.log", seen)
    assert f"kill {process.pid}" in seen
    served = re.findall(r"metrics of the (\S+): (http://127.0.0.1:\d+)/metrics", seen)
    assert [name for name, _ in served] == ["key-server", "shuffler", "aggregator"]
    for _, address in served:
        with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
            assert b"ntkfl_info" in answer.read()
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "go on with: ntkfl deploy try trial" in rest
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
