"""Measurements on the clients' sums themselves: the rule for λ, fewer bits, unlearning."""

from __future__ import annotations

import time
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from ntkfl.data import Federated
from ntkfl.tangent.ridge import PENALTIES, RidgeSums, left_out_errors, solve, total
from ntkfl_experiments.backbone.trials import CHOSEN_ON, PARTITIONS, Table

SLACKS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)


def clients_sums(fed: Federated, device: str, clients: int | None = None) -> list[RidgeSums]:
    batches = (fed.client(number) for number in range(len(fed) if clients is None else clients))
    return [RidgeSums.of(x.to(device), nn.functional.one_hot(y.to(device), 10)) for x, y in batches]


def accuracy(weights: Tensor, x: Tensor, y: Tensor) -> float:
    """In percent."""
    x = x.to(weights)
    return round(100 * float(((x @ weights[:-1] + weights[-1]).argmax(1) == y.to(x.device)).double().mean()), 2)


def rule_for_penalty(table: Table, device: str) -> dict[str, Any]:
    """Mean accuracy on held-out clients by `slack`, and by fixed λ: seeds 10 to 12, each partition, 80 and 20 clients.

    For each slack the smallest λ is taken whose left-out error is within this part of the least.
    """
    by_slack: dict[float, list[float]] = {slack: [] for slack in SLACKS}
    by_penalty: dict[float, list[float]] = {penalty: [] for penalty in PENALTIES}
    for partition in PARTITIONS:
        for seed in CHOSEN_ON:
            fed = table.split(partition, seed)
            parts = clients_sums(fed, device)
            for clients in (len(parts), 20):
                whole = total(parts[:clients])
                errors = left_out_errors(parts[:clients], whole, PENALTIES, 5).tolist()
                found = {p: accuracy(solve(whole, p), *fed.test) for p in PENALTIES}
                for penalty, value in found.items():
                    by_penalty[penalty].append(value)
                for slack in SLACKS:
                    good = (1 + slack) * min(errors)
                    own = min(p for p, error in zip(PENALTIES, errors, strict=True) if error <= good)
                    by_slack[slack].append(found[own])
    slacks = {str(slack): round(mean(values), 3) for slack, values in by_slack.items()}
    return {
        "slack": slacks,
        "penalty": {str(p): round(mean(values), 3) for p, values in by_penalty.items()},
        "best": float(max(slacks, key=slacks.__getitem__)),
    }


def quantised(table: Table, seed: int, inputs: str, device: str, penalty: float = 1e-3) -> dict[str, Any]:
    """One round where G travels in fewer bits: accuracy and bytes per client. Of 8 bits, G's diagonal and the features'
    sum stay in float32, and the rest is rounded up or down at random, so that errors of clients cancel.
    """
    fed = table.clients("one label per client", seed, inputs)
    generator = torch.Generator(device).manual_seed(seed)
    totals: dict[str, RidgeSums] = {}
    for sums in clients_sums(fed, device):
        half = float(sums.gram.abs().max()) / 2**15
        grams = {
            "float32": sums.gram.float().double(),
            "float16": (sums.gram / half).half().double() * half,
            "8 bits": _eight_bits(sums.gram, generator),
        }
        for name, gram in grams.items():
            own = RidgeSums(sums.samples, gram, sums.cross, sums.squares)
            totals[name] = totals[name] + own if name in totals else own
    p = fed.input_shape[0] + 1
    numbers, rest = p * (p + 1) // 2, 4 * (10 * p + 2)
    sizes = {"float32": 4 * numbers, "float16": 2 * numbers, "8 bits": numbers + 3 * 2 * p}
    return {
        name: {"accuracy": accuracy(solve(sums, penalty), *fed.test), "bytes_up": sizes[name] + rest}
        for name, sums in totals.items()
    }


def _eight_bits(gram: Tensor, generator: torch.Generator) -> Tensor:
    off = gram - torch.diag(gram.diagonal())
    off[-1] = off[:, -1] = 0
    step = off.abs().max() / 127
    drawn = torch.rand(off.shape, generator=generator, dtype=off.dtype, device=off.device)
    up = torch.triu((off / step + drawn).floor() * step, 1)
    up[:, -1] = 0
    result = up + up.mT + torch.diag(gram.diagonal())
    result[-1], result[:, -1] = gram[-1], gram[:, -1]
    return result


def unlearning(table: Table, seed: int) -> dict[str, float]:
    """Client 17 of 100 taken out, in float64: by subtracting its sums, and by solving from all others' features."""
    fed = table.clients("one label per client", seed)
    pairs = [(x.double(), y) for x, y in map(fed.client, range(len(fed)))]
    parts = [RidgeSums.of(x, nn.functional.one_hot(y, 10)) for x, y in pairs]
    whole, penalty = total(parts), 1e-3
    began = time.perf_counter()
    solved = solve(whole - parts[17], penalty)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    x, y = (torch.cat([pair[i] for j, pair in enumerate(pairs) if j != 17]) for i in (0, 1))
    again = solve(RidgeSums.of(x, nn.functional.one_hot(y, 10)), penalty)
    retraining = time.perf_counter() - began
    return {"difference": float((solved - again).abs().max()), "seconds": seconds, "retraining_seconds": retraining}
