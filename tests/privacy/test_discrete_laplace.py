"""Discrete Laplace noise: its distribution, and whose randomness it is."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from random import Random, SystemRandom

import pytest

from ntkfl.privacy import discrete_laplace as module
from ntkfl.privacy.discrete_laplace import discrete_laplace


@pytest.mark.parametrize("scale", [Fraction(1, 2), Fraction(3), Fraction(7, 3)])
def test_the_distribution_is_the_one_that_is_said(scale: Fraction) -> None:
    """P(x) = (1 − q)/(1 + q)·q^|x|, q = exp(−1/scale), by χ² over the cells that expect 20 or more draws."""
    draws, rng = 4000, Random(11)
    seen = Counter(discrete_laplace(scale, rng) for _ in range(draws))
    q = math.exp(-1 / scale)
    cells = [x for x in range(-60, 61) if draws * (1 - q) / (1 + q) * q ** abs(x) >= 20]
    expected = {x: draws * (1 - q) / (1 + q) * q ** abs(x) for x in cells}
    rest = draws - sum(expected.values())
    others = draws - sum(seen[x] for x in cells)
    chi_square = sum((seen[x] - e) ** 2 / e for x, e in expected.items()) + (others - rest) ** 2 / rest
    freedom = len(cells)  # with the cell of all others, less one
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 6  # beyond the 99.9th percentile


def test_it_draws_from_the_operating_system() -> None:
    assert isinstance(module._SYSTEM, SystemRandom)
    assert len({discrete_laplace(Fraction(10**6)) for _ in range(20)}) > 10
