"""Seconds to an accuracy: NTK-FL against batched FedAvg at the best of its settings, real runs on one machine."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import torch

from ntkfl.data import Dirichlet, Federated, load
from ntkfl.data.catalog import locate
from ntkfl.errors import ConfigError
from ntkfl.federation.run_folder import Record
from ntkfl.federation.simulation import train
from ntkfl.methods import NTKFL, FedAvg, Method
from ntkfl.models import mlp
from ntkfl_experiments.bench.rows import BenchRow, Setting

# Local steps far beyond the paper's 50 save rounds but not seconds; few of them save seconds but not rounds.
_GRID = tuple(itertools.product((0.1, 0.3), (10, 20, 50, 100)))
_MOST_ROUNDS = 400


@dataclass
class _Race:
    """A run towards the goal: seconds of the rounds so far without evaluation, which no deployment pays."""

    fed: Federated
    goal: float
    clients: int
    hidden: int
    device: torch.device
    seed: int

    def run(self, method: Method, limit: float = float("inf")) -> tuple[float | None, int]:
        """(seconds, rounds) until the test accuracy is the goal; no seconds where `limit` of them came first."""
        spent, rounds, reached = 0.0, 0, False

        def on_round(record: Record, timing: Record) -> None:
            nonlocal spent, rounds, reached
            spent, rounds = spent + timing["seconds"] - timing["evaluation_seconds"], record["round"]
            reached = record["test_accuracy"] >= self.goal
            if spent > limit:
                raise _TooSlow

        torch.manual_seed(self.seed)
        model = mlp(math.prod(self.fed.input_shape), self.hidden, 10)
        try:
            train(
                model,
                self.fed,
                method,
                rounds=_MOST_ROUNDS,
                clients_per_round=self.clients,
                seed=self.seed,
                stop_at=self.goal,
                device=self.device,
                callbacks=[on_round],
            )
        except _TooSlow:
            return None, rounds
        return (spent if reached else None), rounds


class _TooSlow(Exception):
    """A run that cannot be the fastest any more."""


def accuracy(setting: Setting) -> list[BenchRow]:
    """Seconds to 85 % test accuracy on non-IID Fashion-MNIST, NTK-FL and FedAvg."""
    real = not setting.quick and locate("fashion-mnist") is not None
    if not real:  # nothing is downloaded to time it
        fed, goal, clients, hidden = load("digits").partition(Dirichlet(20, 0.5), seed=0), 0.5, 5, 16
    else:
        fed, goal, clients, hidden = load("fashion-mnist").partition(Dirichlet(300, 0.1), seed=0), 0.85, 20, 100
    race = _Race(fed, goal, clients, hidden, setting.device, seed=0)
    grid = _GRID[:1] if setting.quick else _GRID
    race.run(NTKFL(), limit=0.0)  # the first round of a process pays for its start
    ours, our_rounds = race.run(NTKFL())
    if ours is None:
        raise ConfigError(f"NTK-FL did not reach {goal:.0%} in {_MOST_ROUNDS} rounds")
    rows = [
        BenchRow(
            "NTK-FL, defaults",
            ours,
            1.0,
            note=f"{our_rounds} rounds to {goal:.0%}" + ("" if real else " of the digits"),
        )
    ]
    best = float("inf")
    for lr, steps in grid:
        seconds, rounds = race.run(FedAvg(lr=lr, local_steps=steps, average=0.9), limit=min(best, 20 * ours + 5))
        if seconds is not None:
            best = min(best, seconds)
            rows.append(
                BenchRow(f"FedAvg, η = {lr:g}, {steps} steps", seconds, seconds / ours, note=f"{rounds} rounds")
            )
    first, others = rows[0], sorted(rows[1:], key=lambda row: row.seconds)
    if others:
        tried = f"averaged; the best of {len(grid)} settings of η and local steps, each run until it cannot win"
        goal_ratio = None if setting.quick else 1.0
        others[0] = replace(others[0], goal=goal_ratio, note=f"{others[0].note}; {tried}")
    return [first, *others]
