"""Small deployments of digits for tests: terms, members in this process, and the same run without Flower."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ntkfl
from ntkfl.deployment.contract import Terms
from ntkfl.federation.build import build_method
from ntkfl.federation.client import SeededRandomness
from ntkfl.flower.apps import client_app
from ntkfl.flower.client import FlowerClient
from ntkfl.flower.server import FlowerRun, FlowerServer
from tests.flower.local_grid import App, LocalGrid

NODES = [1001, 1002, 1003, 1004]
NTK = {"name": "ntk-fl", "steps": [50.0, 200.0, 800.0]}
Batch = tuple[torch.Tensor, torch.Tensor]


def digits(clients: int = 4) -> ntkfl.data.Federated:
    return ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=clients, alpha=1.0), seed=0)


def settings(method: dict[str, Any], **others: Any) -> FlowerRun:
    values: dict[str, Any] = {
        "inputs": [1, 8, 8], "outputs": 10, "precision": "float64", "rounds": 3, "clients": 4, "clients_per_round": 3,
        "seed": 7, "round_seconds": 1.0, "patience": 0.5, "model": {"hidden": [12]}, "method": method,
    }  # fmt: skip
    return FlowerRun(**(values | others))


def member(
    run: FlowerRun, folder: Path, number: int, read: Callable[[], Batch] | None = None, **others: Any
) -> FlowerClient:
    fed = digits()
    terms = Terms(**run.model_dump(include=set(Terms.model_fields)))
    source = read or (lambda: fed.client(number))
    draws = SeededRandomness(run.seed, number)
    return FlowerClient(
        terms,
        folder / f"client-{number}",
        source,
        number=number,
        clients=4,
        randomness=draws,
        allow_code=True,
        **others,
    )


def apps(run: FlowerRun, folder: Path, **others: Any) -> dict[int, App]:
    return {node: client_app(member(run, folder, i, **others)) for i, node in enumerate(NODES)}


def deployed(
    grid: LocalGrid, run: FlowerRun, out: Path, say: Callable[[str], None] = lambda line: None
) -> FlowerServer:
    nodes = {f"client-{i}": node for i, node in enumerate(NODES)}
    return FlowerServer(grid, nodes, run, out, test=digits().test, say=say, allow_code=True)


def simulated(run: FlowerRun, **others: Any) -> ntkfl.Run:
    """The same run in one process."""
    fed = digits()
    method = build_method(run.method)
    options = {"rounds": run.rounds, "clients_per_round": run.clients_per_round, "seed": run.seed}
    return ntkfl.train(run.build_model(run.seed, allow_code=True), fed, method, **(options | others))


def distance(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> float:
    return max(float((value - weights[name]).abs().max()) for name, value in model.state_dict().items())
