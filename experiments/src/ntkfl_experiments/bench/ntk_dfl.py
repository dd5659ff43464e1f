"""NTK-FL from sums on the partitions of NTK-DFL (Thompson et al., ICML 2025): Fashion-MNIST, 300 clients, α = 0.1.

`python -m ntkfl_experiments.bench.ntk_dfl results/sums/ntk-dfl.json` makes five such partitions by the same rule, and
writes the accuracy by round and the sizes of clients.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

import ntkfl
from ntkfl.data.partitions import Indices, Partition
from ntkfl.methods import Method, SumNTKFL

SEEDS, ROUNDS, COHORT = (20, 21, 22, 23, 24), 12, 20
METHODS: dict[str, Method] = {"sum-ntk-fl": SumNTKFL()}


@dataclass(frozen=True)
class RoundedDown(Partition):
    """Client m has ⌊s q_c⌋ random samples of class c, q ~ Dir(α, …, α), s = N / clients.

    Clients draw independently of one another, so that some samples are at several clients and others at none.
    """

    kind: ClassVar[str] = "rounded-down"
    by_class: ClassVar[bool] = True

    clients: int
    alpha: float

    def assign(self, labels: Indices, writers: Indices | None, rng: np.random.Generator) -> list[Indices]:
        pools, size = [np.flatnonzero(labels == c) for c in np.unique(labels)], len(labels) // self.clients
        shares = []
        for _ in range(self.clients):
            counts = (size * rng.dirichlet(np.full(len(pools), self.alpha))).astype(int)
            drawn = [rng.choice(pool, count, replace=False) for pool, count in zip(pools, counts, strict=True)]
            shares.append(np.sort(np.concatenate(drawn)))
        return shares


def play(method: str, seed: int) -> dict[str, Any]:
    """One run of the README's perceptron."""
    fed = ntkfl.data.load("fashion-mnist").partition(RoundedDown(clients=300, alpha=0.1), seed=seed)
    torch.manual_seed(seed)
    model = ntkfl.models.mlp(784, 100, 10)
    run = ntkfl.train(
        model, fed, METHODS[method], rounds=ROUNDS, clients_per_round=COHORT, seed=seed, stop_at=0.85, callbacks=[]
    )
    accuracy = [round(record["test_accuracy"], 4) for record in run.history]
    reached = len(accuracy) if accuracy[-1] >= 0.85 else None
    sizes = [min(fed.sizes), max(fed.sizes)]
    return {"method": method, "seed": seed, "sizes": sizes, "rounds to 85%": reached, "accuracy": accuracy}


if __name__ == "__main__":
    runs = [play(method, seed) for method in METHODS for seed in SEEDS]
    Path(sys.argv[1]).write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
