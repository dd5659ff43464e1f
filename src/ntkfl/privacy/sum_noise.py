"""Integers with discrete Gaussian noise under one budget: how much a record changes their sum, how wide the noise is.

A vector of norm at most 1 becomes integers, `GRAINS` of them per unit, rounded up or down at random. `SumBudget` gives
each release its part of (ε, δ), and with it the width of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkfl.errors import ConfigError
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.sum_accounting import Release, budget, concentrated, spent

GRAINS = 2**14  # integers that a norm of 1 becomes
COUNT = GRAINS // 10  # what one sample adds to the count, beside its gradient
ROUNDING = 1e-3  # by which norms computed in float32 may be off
_LEAST_WIDTH = 8.0  # sums of narrower discrete Gaussians are not nearly one


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
