"""Small clients of their own data, the networks that train on them, and the same run in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result
from torch import Tensor, nn

import ntkfl
from ntkfl.data import Federated, from_clients
from ntkfl.flower import Strategy, reply
from ntkfl.methods import NTKFL, FedAvg, Method, SumNTKFL
from tests.flower.grids import LocalGrid

CLIENTS, SEED = 4, 7
Weights = Mapping[str, Tensor]


def samples(clients: int = CLIENTS, shape: tuple[int, ...] = (6,), classes: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Clients of unequal sizes with labels that inputs decide."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for client in range(clients):
        x = torch.randn(20 + 3 * client, *shape, generator=draw)
        found.append((x, x.flatten(1)[:, :classes].argmax(1)))
    return found


def federated(clients: list[tuple[Tensor, Tensor]], tokens: bool = False) -> Federated:
    return from_clients(clients, test=clients[0], tokens=tokens)


def perceptron() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def convolution() -> nn.Module:
    """Factors of a convolution are rough: sum-ntk-fl measures its step in a second exchange."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    return net.double()


def normalised() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def train(make: Callable[[], nn.Module], data: Any, **how: Any) -> ClientApp:
    """The app of one client, as its user writes it."""
    made = ClientApp()

    @made.train()
    def _(msg: Message, context: Context) -> Message:
        return reply(msg, context, make(), data, **{"seed": SEED, **how})

    return made


def grid_of(make: Callable[[], nn.Module], clients: list[tuple[Tensor, Tensor]], **how: Any) -> LocalGrid:
    """Node ids in the order of partitions."""
    return LocalGrid({10 * (i + 1): train(make, data, **how) for i, data in enumerate(clients)})


def run(
    grid: LocalGrid,
    method: Method,
    make: Callable[[], nn.Module],
    rounds: int = 3,
    *,
    checkpoint: Path | None = None,
    start: Mapping[str, Any] | None = None,
    **how: Any,
) -> Result:
    given = {"robust": None, "checkpoint": checkpoint, "fraction_evaluate": 0.0} | how
    strategy = Strategy(method, make(), **given)
    return strategy.start(grid, ArrayRecord(make().state_dict()), rounds, **{"timeout": 2, **(start or {})})


def in_process(
    method: Method,
    make: Callable[[], nn.Module],
    clients: list[tuple[Tensor, Tensor]],
    rounds: int = 3,
    *,
    tokens: bool = False,
    **how: Any,
) -> Weights:
    given = {"rounds": rounds, "seed": SEED, "callbacks": []} | how
    return ntkfl.train(make(), federated(clients, tokens), method, **given).model.state_dict()


def weights(result: Result) -> Weights:
    return result.arrays.to_torch_state_dict()


def difference(one: Weights, other: Weights) -> float:
    """The largest between any two numbers of two state dicts; a count of batches aside, which nothing depends on."""
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).abs().max()) for n in one if not n.endswith("num_batches_tracked"))


# One method of each kind of reply, its network, its data and its rounds: run by real SuperNodes.
THREE: list[tuple[Method, Callable[[], nn.Module], tuple[int, ...], int]] = [
    (FedAvg(), normalised, (6,), 1),
    (SumNTKFL(), convolution, (1, 6, 6), 1),
    (NTKFL(), perceptron, (6,), 1),
]
