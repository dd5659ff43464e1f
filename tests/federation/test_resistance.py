"""What one Byzantine client of twenty can do against the defaults: each attack costs a few points at most."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import ntkfl
from ntkfl.federation.config import Byzantine
from ntkfl.federation.simulation import Simulation
from ntkfl.methods import METHODS

SMALL: dict[str, dict[str, Any]] = {
    "ntk-fl": {},
    "cp-ntk-fl": {"projected_dim": 24, "sparsity": 0.9},
    "fedavg": {"lr": 0.1, "local_steps": 50, "robust": "clip"},
}
ROUNDS = {"ntk-fl": 4, "cp-ntk-fl": 5, "fedavg": 12}


@functools.cache
def digits(seed: int) -> ntkfl.data.Federated:
    """Twenty clients of 72 samples, every one in every round."""
    return ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=20, alpha=0.5), seed=seed)


def accuracy(name: str, kind: str = "", byzantine: int = 1, scale: float = 1.0) -> float:
    return float(played(name, kind, byzantine, scale)[-1]["test_accuracy"])


@functools.cache
def played(name: str, kind: str = "", byzantine: int = 1, scale: float = 1.0, seed: int = 0) -> list[dict[str, Any]]:
    method = METHODS[name](**SMALL[name])
    torch.manual_seed(seed)
    model = ntkfl.models.mlp(method.projected_dim or 64, 24, 10, **method.model_defaults)
    attack = Byzantine(kind=kind, fraction=byzantine / 20, scale=scale) if kind else None
    simulation = Simulation(model, digits(seed), method, clients_per_round=20, seed=seed, byzantine=attack)
    return simulation.run(ROUNDS[name]).history


ATTACKS = [
    ("ntk-fl", "shortest-flow", 1.0),
    ("ntk-fl", "false-losses", 1.0),
    ("ntk-fl", "wrong-labels+flood", 14.0),
    ("ntk-fl", "wrong-labels+flood+shortest-flow", 14.0),
    ("ntk-fl", "sign-flip", 900.0),
    ("ntk-fl", "sign-flip", 7.0),
    ("cp-ntk-fl", "shortest-flow", 1.0),
    ("cp-ntk-fl", "wrong-labels+flood+shortest-flow", 14.0),
    ("cp-ntk-fl", "sign-flip", 7.0),
    ("fedavg", "sign-flip", 5.0),
]


@pytest.mark.parametrize(("name", "kind", "scale"), ATTACKS)
def test_one_of_twenty_costs_five_points_at_most(name: str, kind: str, scale: float) -> None:
    assert accuracy(name) > 0.85
    assert accuracy(name, kind, 1, scale) > accuracy(name) - 0.05


@pytest.mark.parametrize(("name", "kind", "scale"), [("ntk-fl", "shortest-flow", 1.0), ("ntk-fl", "sign-flip", 7.0)])
def test_four_of_twenty_cost_fifteen_points_at_most(name: str, kind: str, scale: float) -> None:
    assert accuracy(name, kind, 4, scale) > accuracy(name) - 0.15


def test_a_long_row_buys_no_time_of_the_solver() -> None:
    """Jacobians turned round and as long as passes for honest: a round's products stay what they were."""
    honest, corrupted = played("ntk-fl", "", 1, 1.0), played("ntk-fl", "sign-flip", 1, 9.0)
    assert max(r["kernel_products"] for r in corrupted) < 2 * max(r["kernel_products"] for r in honest)
