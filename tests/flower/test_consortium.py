"""A consortium of five on loopback: a SuperLink, five SuperNodes, a shuffler and a key server, and two runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ntkfl.methods import Privacy
from tests.services.federation import federation

FIVE = 5
ROOT, BIN = Path(__file__).parents[2], Path(sys.executable).parent
PRIVACY = Privacy(projected_dim=6, projection="gaussian", subsample_rate=0.8, sparsity=0.5)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(7)
    xs = [torch.randn(12, 12, generator=drawn) for _ in range(FIVE)]
    return [(x, x[:, :3].argmax(1)) for x in xs]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_five_clients_play_two_runs(tmp_path: Path) -> None:
    home, log, at = tmp_path / "home", tmp_path / "log", f"127.0.0.1:{free_port()}"
    for folder in (home, log):
        folder.mkdir()
    here = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{at}"\ninsecure = true\n'
    (home / "config.toml").write_text(here)
    env = {**os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "PATH": f"{BIN}{os.pathsep}{env['PATH']}"}

    def start(name: str, *arguments: str) -> None:
        out = stack.enter_context((log / f"{name}-{arguments[-1]}.log").open("w"))
        command = [str(BIN / name), "--insecure", *arguments]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=log)
        stack.callback(process.wait)
        stack.callback(process.kill)
        stack.callback(process.wait, 10)
        stack.callback(process.terminate)

    def run(name: str) -> Path:
        out, began = tmp_path / name, time.monotonic()
        config = f'folder="{made.folder / "aggregator"}" out="{out}"'
        command = [str(BIN / "flwr"), "run", str(ROOT / "tests" / "flower" / "consortium"), "here"]
        subprocess.run([*command, "--run-config", config], env=env, cwd=tmp_path, check=True, timeout=60)
        while not out.exists():
            said = "\n".join(path.read_text()[-3000:] for path in log.iterdir())
            assert time.monotonic() < began + 500, said
            time.sleep(0.5)
        time.sleep(0.5)
        return out

    with federation(tmp_path, FIVE) as made, ExitStack() as stack:
        host, port = at.split(":")
        start("flower-superlink", "--host", host, "--port", port)
        while True:
            try:
                socket.create_connection((host, int(port))).close()
                break
            except OSError:
                time.sleep(0.2)
        for number in range(FIVE):
            config = f'partition-id={number} ntkfl-folder="{made.folder / "clients" / f"client-{number}"}"'
            start("flower-supernode", "--superlink", at, "--node-config", config, "--port", str(free_port()))
        first, second = load_file(run("first")), load_file(run("second"))
        assert not all(torch.equal(first[name], net().state_dict()[name]) for name in first)
        assert not all(torch.equal(first[name], second[name]) for name in first)  # another ρ, other samples
        runs = sorted((made.folder / "shuffler").glob("run-*.sqlite"))
        assert len(runs) == 2
        print("files", len([p for p in made.folder.rglob("*") if p.is_file()]))
