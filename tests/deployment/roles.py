"""A whole federation on loopback: every role a process of its own, with TLS, on digits."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import tomli_w
import torch

import ntkfl
from ntkfl.data.npz import deal
from ntkfl.deployment.demo_setup import DemoSetup, init
from ntkfl.privacy.subsample import equal_rows
from tests.services.processes import Process

HERE = Path(__file__).parent
METHOD = {
    "name": "cp-ntk-fl",
    "projected_dim": 20,
    "subsample_rate": 0.5,
    "sparsity": 0.8,
    "steps": [50.0, 200.0, 800.0],
}


def digits(clients: int) -> ntkfl.data.Federated:
    return ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=clients, alpha=1.0), seed=0)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Roles:
    """Folders and processes of a federation in `folder`; everything is killed at the end."""

    def __init__(
        self, folder: Path, clients: int = 4, evaluators: int = 1, min_clients: int = 2, **settings: Any
    ) -> None:
        self.folder, self.fed = folder / "federation", digits(clients)
        deal(self.fed, folder / "data")
        self.data, self.out = folder / "data", folder / "run"
        method = settings.get("method", METHOD)
        self.rows = equal_rows(self.fed.sizes, method.get("subsample_rate", 1.0))  # as a simulation sends
        config = {
            "inputs": [1, 8, 8], "outputs": 10, "precision": "float64", "rounds": 3, "clients": clients,
            "clients_per_round": 3, "evaluators": evaluators, "round_seconds": 200.0, "patience": 200.0,
            "model": {"hidden": [12]}, "method": METHOD, "max_rows": self.rows,
        } | settings  # fmt: skip
        (folder / "run.toml").write_text(tomli_w.dumps(config))
        ports = dict(zip(("key_server_port", "shuffler_port", "aggregator_port"), free_ports(3), strict=True))
        setup = DemoSetup(clients=clients, evaluators=evaluators, min_clients=min_clients, **ports)
        self.peers = init(self.folder, folder / "run.toml", setup)
        self.processes: list[Process] = []

    def start(self, *arguments: str | Path, listeners: int = 0) -> Process:
        """A service as it is; the others, which need torch, forked from a process that has it."""
        self.processes.append(Process(*arguments, listeners=listeners, forked=not listeners))
        return self.processes[-1]

    def key_server(self) -> Process:
        return self.start("-m", "ntkfl", "serve", "key-server", self.folder / "key-server", listeners=1)

    def shuffler(self) -> Process:
        return self.start("-m", "ntkfl", "serve", "shuffler", self.folder / "shuffler", listeners=2)

    def client(self, number: int, seed: int | None = None) -> Process:
        seeds = [] if seed is None else [str(seed), str(number)]
        name = f"client-{number}"
        return self.start(HERE / "client_process.py", self.folder / "clients" / name, self.data / f"{name}.npz", *seeds)

    def evaluator(self) -> Process:
        return self.start(HERE / "client_process.py", self.folder / "clients" / "evaluator-0", self.data / "test.npz")

    def aggregator(self) -> Process:
        return self.start("-m", "ntkfl", "aggregate", self.folder / "aggregator", "--out", self.out)

    def weights(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self.out / "model.safetensors")

    def __enter__(self) -> Roles:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.__exit__(None, None, None)
