"""Discrete Gaussian draws against their probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ntkfl.privacy.discrete_gaussian import discrete_gaussians
from ntkfl.privacy.randomness import Randomness


def probabilities(sigma: float, most: int) -> dict[int, float]:
    weights = {k: math.exp(-0.5 * (k / sigma) ** 2) for k in range(-40 * most, 40 * most + 1)}
    total = math.fsum(weights.values())
    return {k: weights[k] / total for k in range(-most, most + 1)}


@pytest.mark.parametrize("sigma", [0.5, 1.3, 4.0])
def test_counts_are_those_of_the_distribution(sigma: float) -> None:
    count, most = 200_000, math.ceil(2 * sigma)
    draws = discrete_gaussians(sigma, count, Randomness(bytes(32)))
    for k, p in probabilities(sigma, most).items():
        assert abs(int((draws == k).sum()) - count * p) < 5 * math.sqrt(count * p) + 1


@pytest.mark.parametrize("sigma", [50.0, 13_500.0, 2.0**18 + 0.3])
def test_moments_of_wide_noise(sigma: float) -> None:
    count = 100_000
    draws = discrete_gaussians(sigma, count, Randomness(bytes(range(32)))) / sigma
    assert abs(float(draws.mean())) < 5 / math.sqrt(count)
    assert abs(float((draws**2).mean()) - 1) < 5 * math.sqrt(2 / count)
    assert abs(float((draws**4).mean()) - 3) < 5 * math.sqrt(96 / count)


class Chosen(Randomness):
    """A stream that gives the words it was told to."""

    def __init__(self, words: list[int], more: list[int]) -> None:
        super().__init__(bytes(32))
        self.parts = {0: words, 1: more}

    def words(self, purpose: object, count: int, part: int = 0) -> np.ndarray:  # type: ignore[override, type-arg]
        return np.array(self.parts[part][:count], dtype=np.uint64)


def test_the_ends_of_the_stream_are_sizes_too() -> None:
    """The last places of all draw again: sizes are within 9.5 σ, and the sign is the first bit."""
    last, sign = 2**63 - 1, 2**63
    draws = discrete_gaussians(3.0, 4, Chosen([0, sign, last, sign | last], [0, last]))
    assert draws[0] == draws[1] == 0
    assert 0 <= draws[2] <= 29
    assert -29 <= draws[3] <= 0
    middle = discrete_gaussians(3.0, 2, Chosen([1 << 62, sign | (1 << 62)], []))
    assert middle[0] == -middle[1] == 2  # half of all |x| are at most 2, as 0.6745 σ = 2.02


def test_places_add_up_to_the_distribution() -> None:
    """Whole places and what is left over of them, by bisection on the word: P(|x| ≤ k) to 2^-50."""
    sigma = 3.0
    p = probabilities(sigma, 3)
    low, high = 0, 2**63 - 1
    while high - low > 1:  # the first word whose size is above 0
        middle = (low + high) // 2
        low, high = (middle, high) if discrete_gaussians(sigma, 1, Chosen([middle], [0]))[0] == 0 else (low, middle)
    assert abs(high / 2**63 - p[0]) < 2.0**-50


def test_other_keys_give_other_noise_and_the_same_the_same() -> None:
    one, same, other = (discrete_gaussians(100.0, 50, Randomness(bytes([k]) * 32)) for k in (1, 1, 2))
    assert (one == same).all()
    assert (one != other).any()
