"""The head with differential privacy: ridge from noisy sums in one round, gradient sums in five."""

from __future__ import annotations

import math
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from ntkfl.methods.sums.noisy_sums import scaled_triangle, unscaled
from ntkfl.methods.sums.private_ridge import cleaned
from ntkfl.privacy.sum_accounting import budget
from ntkfl_experiments.backbone.trials import CHOSEN_ON, CLIENTS, SEEDS, HeadTrial, Table

EPSILONS, DELTA = (3.0, 1.0), 1e-5
CHOSEN_AT = 3.0
GRADIENT_PRIVACY = {"epsilon": CHOSEN_AT, "delta": DELTA, "budget_rounds": 5, "noise_clients": CLIENTS}
INPUTS = ("unit", "unit both")
SHARES, PENALTIES = (0.5,), (0.1, 0.2, 0.3, 0.5, 0.8, 1.2)


def ridge_settings(table: Table, device: str) -> dict[str, Any]:
    """Mean accuracy on held-out clients at ε = 3 by share of the budget and penalty, and the best, by inputs.

    Continuous noise on the total stands for the clients' discrete shares here: it is as wide.
    """
    found: dict[str, Any] = {}
    for inputs in INPUTS:
        scores: dict[tuple[float, float], list[float]] = {}
        for seed in CHOSEN_ON:
            fed = table.split("α = 0.1", seed, inputs)
            pairs = [fed.client(number) for number in range(len(fed))]
            x = _scaled(torch.cat([x for x, _ in pairs]).to(device))
            y = torch.cat([y for _, y in pairs]).to(device)
            held, labels = _scaled(fed.test[0].to(device)), fed.test[1].to(device)
            targets = nn.functional.one_hot(y, 10).to(x)
            gram, cross = scaled_triangle(x.mT @ x), x.mT @ targets
            generator = torch.Generator(device).manual_seed(seed)
            drawn = [torch.randn(t.shape, generator=generator, dtype=t.dtype, device=device) for t in (gram, cross)]
            for share in SHARES:
                rho = budget(CHOSEN_AT, DELTA)
                on_gram, on_cross = (1 / math.sqrt(2 * rho * part) for part in (share, 1 - share))
                noisy = gram + on_gram * drawn[0], cross + on_cross * drawn[1]
                values, vectors = torch.linalg.eigh(unscaled(noisy[0]))
                edge = 2 * on_gram * math.sqrt(x.shape[1] / 2)
                clean = cleaned(values, edge)
                for penalty in PENALTIES:
                    W = vectors @ ((vectors.mT @ noisy[1]) / (clean + penalty * edge).unsqueeze(1))
                    right = float(((held @ W).argmax(1) == labels).double().mean())
                    scores.setdefault((share, penalty), []).append(100 * right)
        means = {key: round(mean(values), 2) for key, values in scores.items()}
        share, penalty = max(means, key=means.__getitem__)
        found[inputs] = {
            "best": {"penalty": penalty},
            "accuracy": {f"share {s} penalty {p}": value for (s, p), value in means.items()},
        }
    return found


def _scaled(x: Tensor) -> Tensor:
    a = torch.cat([x, x.new_ones(len(x), 1)], dim=1).double()
    unit: Tensor = a / a.norm(dim=1, keepdim=True)
    return unit


def ridge_reports(settings: dict[str, Any]) -> list[HeadTrial]:
    """One partition: what is released does not depend on it."""
    trials = []
    for inputs in INPUTS:
        for epsilon in EPSILONS:
            method = {"name": "private-ridge"} | settings[inputs]["best"]
            privacy = {"epsilon": epsilon, "delta": DELTA, "noise_clients": CLIENTS}
            name = f"private-ridge ε {epsilon:g}, {inputs}"
            trials += [
                HeadTrial(name, "one label per client", seed, method, 1, CLIENTS, inputs, privacy=privacy)
                for seed in SEEDS
            ]
    return trials


def gradient_searches() -> list[HeadTrial]:
    """private-sums for five rounds on a linear head."""
    base = {"name": "private-sums", "clip": 5.0, "label_smoothing": 0.0, "input_share": 0.3, "momentum": 0.5}
    return [
        HeadTrial(
            f"private-sums lr {lr} damping {damping}",
            "α = 0.1",
            seed,
            base | {"lr": lr, "damping": damping},
            5,
            CLIENTS,
            "unit",
            held=True,
            privacy=GRADIENT_PRIVACY,
        )
        for lr in (100.0, 200.0, 400.0)
        for damping in (1.0, 4.0)
        for seed in CHOSEN_ON[:2]
    ]


def gradient_reports(chosen: HeadTrial) -> list[HeadTrial]:
    return [
        HeadTrial(
            "private-sums ε 3, five rounds, unit",
            "α = 0.1",
            seed,
            chosen.method,
            5,
            CLIENTS,
            "unit",
            privacy=chosen.privacy,
        )
        for seed in SEEDS
    ]
