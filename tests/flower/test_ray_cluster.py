"""Ray's ports are for the simulation's own processes: whoever else connects runs nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ntkfl.flower import simulate
from tests.flower.test_simulate import config

# What a stranger on the network does who has found the port.
ATTACK = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
task = ray.remote(num_cpus=0)(lambda: "a stranger's task ran")
print(ray.get(task.remote(), timeout=30))
"""
FEDAVG = {"name": "fedavg", "local_steps": 1}


def listening(among: set[int]) -> set[str]:
    """Addresses (hexadecimal, as the system lists them) on which these processes listen."""
    inodes = set()
    for pid in among:
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(handle)))
            except FileNotFoundError:  # closed meanwhile
                continue
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def descendants(of: int) -> set[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found = {of}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_stranger_cannot_run_a_task_in_a_simulation_s_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    tried: list[subprocess.CompletedProcess[str]] = []
    addresses: set[str] = set()

    def attack(*_: Any) -> None:
        import ray

        at = ray.get_runtime_context().gcs_address
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        if at.startswith("127."):
            clean["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # or Ray would try the machine's other address
        for environment in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
            command = [sys.executable, "-c", ATTACK, at]
            tried.append(subprocess.run(command, env=clean | environment, capture_output=True, text=True, timeout=120))
        addresses.update(listening(descendants(os.getpid())))

    simulate.simulate(config(FEDAVG, rounds=1), on_round=attack)
    assert len(tried) == 2
    for outcome in tried:
        assert "a stranger's task ran" not in outcome.stdout
        assert outcome.returncode != 0
        assert "Error" in outcome.stderr
    # 127.0.0.1, as an IPv4 address and mapped into IPv6: no other interface.
    assert addresses
    assert addresses <= {"0100007F", "0000000000000000FFFF00000100007F"}


def begin() -> None:
    with pytest.raises(InterruptedError):
        simulate.simulate(config(FEDAVG))
