"""NTK-FL from sums as it is on networks that nobody chose it for, beside FedAvg: digits, 5 of 10 clients, α = 0.1.

`python -m ntkfl_experiments.bench.any_network results/sums/networks/results.json` writes the accuracy by round and the
rounds whose step was taken back, of every network, initialisation and seed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ntkfl
from ntkfl.methods import FedAvg, Method, SumNTKFL
from ntkfl.models import resnet
from ntkfl_experiments.networks import transformer

CLIENTS, ALPHA, SEEDS, ROUNDS, COHORT = 10, 0.1, (20, 21, 22), 12, 5
INITIALISATIONS = ("torch", "he")
METHODS: dict[str, Method] = {"sum-ntk-fl": SumNTKFL(), "fedavg": FedAvg(local_epochs=5, batch_size=20, lr=0.1)}
_DENSE = nn.Linear | nn.Conv2d


def _perceptron(*sizes: int, act: type[nn.Module]) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), act()]
    return nn.Sequential(*layers[:-1])


def _convolutional(*layers: nn.Module, features: int) -> nn.Module:
    """Layers, and a perceptron of one hidden layer on what they give."""
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 10))


def _pooling() -> nn.Module:
    first = (nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return _convolutional(*first, nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), features=128)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp2": lambda: _perceptron(64, 64, 64, 10, act=nn.ReLU),
    "mlp3": lambda: _perceptron(64, 128, 128, 64, 10, act=nn.GELU),
    "cnnpool": _pooling,
    "wide": lambda: _convolutional(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), features=2048),
    "resnet": lambda: resnet((1, 8, 8), 10, (8, 16)),
    # An image row by row.
    "transformer": lambda: nn.Sequential(nn.Flatten(1, 2), transformer((8, 8), 10, width=32, heads=4, layers=2)),
}


def network(name: str, initialisation: str, seed: int) -> nn.Module:
    """With PyTorch's own initialisation of its layers, or He's."""
    torch.manual_seed(1000 + seed)
    model = NETWORKS[name]()
    for module in model.modules():
        if isinstance(module, _DENSE) and initialisation == "he":
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, _DENSE) and name in ("resnet", "transformer"):  # which begin with one of their own
            module.reset_parameters()
    return model


def play(name: str, initialisation: str, method: str, seed: int, rounds: int, cohort: int) -> dict[str, Any]:
    """One run."""
    deal = ntkfl.data.Dirichlet(clients=CLIENTS, alpha=ALPHA)
    fed = ntkfl.data.load("digits").partition(deal, seed=seed)
    model, how = network(name, initialisation, seed), {"clients_per_round": cohort, "seed": seed}
    run = ntkfl.train(model, fed, METHODS[method], rounds=rounds, callbacks=[], **how)  # type: ignore[arg-type]
    return {
        "network": name,
        "initialisation": initialisation,
        "method": method,
        "seed": seed,
        "accuracy": [round(record["test_accuracy"], 4) for record in run.history],
        "taken_back": [record["round"] for record in run.history if "taken_back" in record],
    }


if __name__ == "__main__":
    runs = [play(*run, ROUNDS, COHORT) for run in product(NETWORKS, INITIALISATIONS, METHODS, SEEDS)]
    Path(sys.argv[1]).write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
