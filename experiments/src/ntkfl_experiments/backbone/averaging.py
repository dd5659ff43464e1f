"""Averaging methods for comparison, twelve settings each, and how the best of them is chosen."""

from __future__ import annotations

from itertools import product
from statistics import mean
from typing import Any

from ntkfl_experiments.backbone.trials import CHOSEN_ON, SEEDS, HeadTrial

SEARCHED_ROUNDS, ROUNDS, PER_ROUND = 10, 50, 20
_RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
# name: option → values; every combination is tried
GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "fedavg": {"lr": _RATES, "local_steps": (10, 50)},
    "scaffold": {"lr": _RATES, "local_steps": (10, 50)},
    "fedprox": {"lr": (0.03, 0.1, 0.3, 1.0), "local_steps": (50,), "mu": (0.01, 0.1, 1.0)},
    "fedadam": {"lr": (0.03, 0.3, 3.0), "local_steps": (10,), "server_lr": (0.003, 0.01, 0.03, 0.1)},
}


def settings(method: str) -> list[dict[str, Any]]:
    grid = GRIDS[method]
    return [
        {"name": method, "batch_size": 50, **dict(zip(grid, values, strict=True))} for values in product(*grid.values())
    ]


def told(options: dict[str, Any]) -> str:
    """How figures name a setting."""
    return " ".join(f"{name} {value}" for name, value in options.items() if name not in ("name", "batch_size"))


def searches(method: str, partition: str) -> list[HeadTrial]:
    """Every setting on every seed that may choose."""
    return [
        HeadTrial(f"{method} {told(own)}", partition, seed, own, SEARCHED_ROUNDS, PER_ROUND, held=True)
        for own in settings(method)
        for seed in CHOSEN_ON
    ]


def best(trials: list[HeadTrial], found: dict[str, Any], last: int = 0) -> HeadTrial:
    """The trial whose setting has the best mean accuracy on held-out clients over all rounds (or the `last` ones)."""
    groups: dict[str, list[HeadTrial]] = {}
    for trial in trials:
        groups.setdefault(trial.name, []).append(trial)
    scores = {name: mean(mean(found[t.key]["accuracy"][-last:]) for t in group) for name, group in groups.items()}
    return groups[max(scores, key=scores.__getitem__)][0]


def at_the_edge(method: str, chosen: dict[str, Any]) -> list[str]:
    """Options whose best value is the first or last that was tried, of three or more."""
    grid = GRIDS[method]
    return [name for name, tried in grid.items() if len(tried) > 2 and chosen[name] in (tried[0], tried[-1])]


def reports(chosen: HeadTrial) -> list[HeadTrial]:
    method = chosen.method["name"]
    return [HeadTrial(method, chosen.partition, seed, chosen.method, ROUNDS, PER_ROUND) for seed in SEEDS]
