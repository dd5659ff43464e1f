"""Discrete Gaussian noise on sums of integers: how wide it is, and what it is worth over a whole run.

A vector of norm at most 1 becomes integers, `GRAINS` of them per unit, rounded up or down at random. `SumBudget` gives
each release its part of (ε, δ), and with it the width of the noise.

A vector of integers that a record changes by at most Δ in 2-norm, under the sum of n clients' discrete
Gaussian noise of standard deviation σ each, is ρ-concentrated differentially private with

    ρ = ½ min( Δ²/(n σ²) + τ d / 2,  (Δ/(√n σ) + τ √d)² ),   τ = 10 Σ_{k=1}^{n−1} exp(−2π² σ² k/(k+1))

(Kairouz, Liu, Steinke, The Distributed Discrete Gaussian Mechanism, ICML 2021, theorem 1): sums of discrete Gaussians
are nearly one. ρ of several releases add up, and become ε by a closed form (Canonne, Kamath, Steinke 2020, proposition
12) for any α > 1, as Google's dp-accounting has it. A record is added or removed.

**Sampling.** Where each round draws its clients at random, whatever their data, a given client is in a round with
chance q, and a round that it is not in says nothing about it. Of what a round shows, the cohort included, the Rényi
divergence is then exactly the mean over both cases,

    D_α = ln(1 − q + q e^{(α−1) α ρ}) / (α − 1).

That holds for records too, and for cohorts of fixed size, known to everybody. The usual amplification by *secret*
sampling does not hold for a record of a sampled client: its other records may show that the client was drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkfl.errors import ConfigError
from ntkfl.privacy.randomness import Randomness

GRAINS = 2**14  # integers that a norm of 1 becomes
COUNT = GRAINS // 10  # what one sample adds to the count, beside its gradient
ROUNDING = 1e-3  # by which norms computed in float32 may be off
_LEAST_WIDTH = 8.0  # sums of narrower discrete Gaussians are not nearly one
ORDERS = tuple((1 + np.logspace(-2, 4, 600)).tolist())  # α, Rényi orders
Release = tuple[float, int]  # ρ of what a round releases, and in how many rounds
SIMULATED = (
    "simulated: one process has all data, and noise from a seed hides nothing; ε is what a deployment would have"
)
_ADDED = "a record is added or removed: a replaced one is two such changes"


# What releases are worth


def concentrated(change: float, sigma: float, clients: int, numbers: int) -> float:
    """ρ of one release of `numbers` integers: Δ = change, σ of each of `clients` clients."""
    k = np.arange(1, clients)
    tau = 10 * float(np.exp(-2 * math.pi**2 * sigma**2 * k / (k + 1)).sum())
    plain = change / (math.sqrt(clients) * sigma)
    return 0.5 * min(plain**2 + tau * numbers / 2, (plain + tau * math.sqrt(numbers)) ** 2)


def divergences(releases: Sequence[Release], rate: float = 1.0) -> NDArray[np.float64]:
    """Σ D_α of all releases at `ORDERS`, where a client is drawn in each round with chance `rate`."""
    a, total = np.asarray(ORDERS), np.zeros(len(ORDERS))
    for rho, times in releases:
        x = (a - 1) * a * rho
        total += times * (x if rate == 1 else np.logaddexp(math.log1p(-rate), math.log(rate) + x)) / (a - 1)
    return total


def spent(releases: Sequence[Release], delta: float, rate: float = 1.0) -> float:
    """ε of the releases: min over α of D_α − ln(αδ)/(α − 1) + ln(1 − 1/α), at least 0."""
    if all(rho == 0 for rho, _ in releases):
        return 0.0
    a = np.asarray(ORDERS)
    return max(0.0, float((divergences(releases, rate) - np.log(a * delta) / (a - 1) + np.log1p(-1 / a)).min()))


@lru_cache(maxsize=64)
def budget(epsilon: float, delta: float, parts: tuple[Release, ...] = ((1.0, 1),), rate: float = 1.0) -> float:
    """The largest ρ that is worth (ε, δ), where releases take these parts of it: (part, in how many rounds)."""
    if not (epsilon > 0 and 0 < delta < 1):
        raise ConfigError(f"privacy is ε above 0 and δ between 0 and 1, got {epsilon} and {delta}")

    def worth(rho: float) -> float:
        return spent([(rho * part, times) for part, times in parts], delta, rate)

    low, high = 0.0, 1.0
    while worth(high) < epsilon:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if worth(middle) <= epsilon else (low, middle)
    if low == 0:
        raise ConfigError(f"no noise is wide enough for ε = {epsilon:g} at δ = {delta:g}: take a larger δ")
    return low


def guarantee(
    releases: Sequence[Release], delta: float, *, clients: int, against: str, secure: bool, rate: float = 1.0
) -> dict[str, Any]:
    """(ε, δ) of a record in a simulation, of `releases`, `against` those who see them, where the noise of `clients`
    honest clients counts; and what that assumes. As a run's folder keeps it.
    """
    trust = "aggregator and shuffler do not collude" if secure else "the server sees each client's reply: it is trusted"
    honest = f"at least {clients} clients of each round are honest; others may tell their noise"
    sampled = "no credit for sampling: the client may be in every round, and cohorts are no secret"
    if rate < 1:
        sampled = f"the server draws cohorts at random, whatever came before: a client with chance {rate:.3g} at most"
    return {
        "epsilon": spent(releases, delta, rate),
        "delta": delta,
        "against": against,
        "assumptions": (SIMULATED, _ADDED, trust, honest, sampled),
        "simulated": True,
        "unit": "record",
    }


# How wide the noise is


def integer_change(
    sizes: Sequence[int], counted: bool = False, grains: int = GRAINS, rounding: float = ROUNDING
) -> float:
    """Δ: the 2-norm by which a record changes arrays of these `sizes`, and with `counted` the count.

    Before rounding it changes each array by a norm of at most 1. Two real vectors that are a distance apart and rounded
    by the same draws are at most √numbers further apart.
    """
    return math.hypot(grains * (1 + rounding) * math.sqrt(len(sizes)) + math.sqrt(sum(sizes)), COUNT if counted else 0)


def to_integers(values: Sequence[tuple[Tensor, float]], randomness: Randomness, grains: int = GRAINS) -> list[Tensor]:
    """grains · v as integers for each (v [n], limit), clamped to ±limit, rounded up with the remainder's chance."""
    uniforms = torch.from_numpy(randomness.uniforms("rounding", sum(v.numel() for v, _ in values)))
    parts = torch.split(uniforms, [v.numel() for v, _ in values])
    return [
        ((grains * v.double().cpu()).clamp(-limit, limit) + uniform).floor().long()
        for (v, limit), uniform in zip(values, parts, strict=True)
    ]


@dataclass(frozen=True)
class SumBudget:
    """(ε, δ) over `rounds` rounds of noisy sums. The part `once` of it goes to what only the first round releases.

    The noise of `clients` clients counts in each round; `rate` is the chance of a client to be drawn in one.
    """

    epsilon: float
    delta: float
    rounds: int
    once: float = 0.0
    clients: int = 1
    rate: float = 1.0

    def width(self, change: float) -> float:
        """σ of each client's noise on what every round releases, which a record changes by at most `change`."""
        return self._width(change, (1 - self.once) / self.rounds)

    def width_once(self, change: float) -> float:
        """σ of each client's noise on what the first round releases besides."""
        return self._width(change, self.once)

    def spent(self, rounds: int, rate: float | None = None) -> float:
        """ε after `rounds` rounds; at `rate` 1, of a client that was in all of them."""
        return spent(self.releases(rounds), self.delta, self.rate if rate is None else rate)

    def releases(self, rounds: int) -> list[Release]:
        """ρ of this many rounds. The number of coordinates scales Δ and σ alike, so ρ does not depend on it."""
        each, first = concentrated(GRAINS, self.width(GRAINS), self.clients, 1), 0.0
        if self.once:
            first = concentrated(GRAINS, self.width_once(GRAINS), self.clients, 1)
        return [(each + first, min(1, rounds)), (each, max(0, rounds - 1))]

    def _width(self, change: float, part: float) -> float:
        each = (1 - self.once) / self.rounds
        parts = ((each + self.once, 1), (each, self.rounds - 1))
        rho = part * budget(self.epsilon, self.delta, parts, self.rate)
        width = change / math.sqrt(2 * rho * self.clients)
        if width < _LEAST_WIDTH:
            raise ConfigError("so little noise is no privacy: take a smaller epsilon, or none for training without")
        return width
