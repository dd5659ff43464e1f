"""Shapley values of clients, from the sums that a run of `sum-ridge` kept of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ntkfl.errors import ConfigError
from ntkfl.tangent.ridge import RidgeSums, solve, spread, total

EXACT = 12  # clients whose coalitions are all tried


@dataclass(frozen=True)
class Value:
    """A client's part of the squared error that training removed; `error` is 0 where it is exact."""

    client: int
    samples: int
    value: float
    error: float
    name: str = ""


def shapley_values(
    shares: Mapping[int, RidgeSums],
    penalty: float,
    *,
    permutations: int = 100,
    seed: int = 0,
    exact: int = EXACT,
    on_solve: Callable[[int, int], None] = lambda done, planned: None,
) -> list[Value]:
    """Each client's Shapley value under v(S) = max(0, 1 − E(W_S) / E(0)), in the order of the clients.

    E is the squared error over all clients' samples, E(0) that of no model (outputs of zero), and W_S the solution from
    the sums of the clients in S with the penalty of all of them, N λ s, not one of S's own size: few samples that vary
    little would else be fitted with weights without bound. A model worse than none is worth nothing, as nobody would
    use it. So 0 ≤ v ≤ 1, a value lies in [−1, 1], and values add up to the v of all.

    Exact over all coalitions of at most `exact` clients; else the mean over random orders of joining, with its standard
    error.
    """
    clients = sorted(shares)
    whole = total([shares[client] for client in clients])
    scale = spread(whole)

    def worth(sums: RidgeSums) -> float:
        return max(0.0, 1.0 - float(whole.error(solve(sums, penalty, scale)) / whole.squares))

    parts = [shares[client] for client in clients]
    if len(clients) <= exact:
        values, errors = _exact(parts, worth, on_solve), np.zeros(len(parts))
    else:
        values, errors = _sampled(parts, worth, permutations, seed, on_solve)
    return [
        Value(client, int(shares[client].samples), float(value), float(error))
        for client, value, error in zip(clients, values, errors, strict=True)
    ]


def _exact(
    parts: Sequence[RidgeSums], worth: Callable[[RidgeSums], float], on_solve: Callable[[int, int], None]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Over all 2^K coalitions, depth first: at most K sums are held, and each is added up, never subtracted from."""
    K = len(parts)
    found = np.zeros(2**K)
    done = 0

    def visit(coalition: int, sums: RidgeSums | None, first: int) -> None:
        nonlocal done
        if sums is not None:
            found[coalition] = worth(sums)
            done += 1
            on_solve(done, 2**K - 1)
        for i in range(first, K):
            visit(coalition | 1 << i, parts[i] if sums is None else sums + parts[i], i + 1)

    visit(0, None, 0)
    sizes = np.array([coalition.bit_count() for coalition in range(2**K)])
    weight = np.array([1 / (K * math.comb(K - 1, s)) if s < K else 0.0 for s in range(K + 1)])[sizes]
    values = np.zeros(K)
    for i in range(K):
        without = np.array([c for c in range(2**K) if not c >> i & 1])
        values[i] = (weight[without] * (found[without | 1 << i] - found[without])).sum()
    return values


def _sampled(
    parts: Sequence[RidgeSums],
    worth: Callable[[RidgeSums], float],
    permutations: int,
    seed: int,
    on_solve: Callable[[int, int], None],
) -> tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.float64]]]:
    """(means, standard errors) of what a client adds to those before it in a random order."""
    if permutations < 2:
        raise ConfigError("at least two orders are needed for an error bar")
    rng, K = np.random.default_rng(seed), len(parts)
    gains = np.zeros((permutations, K))
    for row in range(permutations):
        sums, before = None, 0.0
        for place, i in enumerate(rng.permutation(K)):
            sums = parts[i] if sums is None else sums + parts[i]
            now = worth(sums)
            gains[row, i], before = now - before, now
            on_solve(row * K + place + 1, permutations * K)
    return gains.mean(0), gains.std(0, ddof=1) / math.sqrt(permutations)
