"""Discrete Gaussian noise on integers, P(x) ∝ exp(−x² / 2σ²), from a client's randomness and many at a time.

Adding it to a vector of integers that a record changes by at most Δ in 2-norm is Δ²/2σ²-concentrated differentially
private (Canonne, Kamath, Steinke, The Discrete Gaussian for Differential Privacy, NeurIPS 2020). Integers have no last
bits that would give the value under the noise away, and can be summed under a mask.

A 64-bit word gives a sign and a place among 2^63. Sizes k = 0, 1, … have ⌊2^63 P(|x| = k)⌋ places each; the few places
left over (about as many as there are sizes) draw again, from what rounding down took from each size. So the
probabilities are right to a factor of 1 ± 2^-51, up to 2^-53 in all, besides sizes beyond 9.5 σ (2^-68).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ntkfl.errors import ConfigError
from ntkfl.privacy.randomness import Integers, Purpose, Randomness

LARGEST_SIGMA = 2.0**22  # of a table that still fits into memory
_TAIL = 9.5  # σ
_PLACES = 2.0**63


def discrete_gaussians(sigma: float, count: int, randomness: Randomness, purpose: Purpose = "noise") -> Integers:
    """`count` independent draws, int64 [count]; σ ≥ 1/2."""
    if not 0.5 <= sigma <= LARGEST_SIGMA:
        raise ConfigError(f"discrete Gaussian noise has a standard deviation from 0.5 to 2^22, got {sigma:.3g}")
    whole, rest = _tables(sigma)
    words = randomness.words(purpose, count)
    sizes = np.searchsorted(whole, words & np.uint64(2**63 - 1), side="right")
    again = np.flatnonzero(sizes == len(whole))
    if len(again):
        more = randomness.words(purpose, len(again), part=1) & np.uint64(2**63 - 1)
        sizes[again] = np.searchsorted(rest, more.astype(np.float64) / _PLACES * rest[-1], side="right")
    sizes = np.minimum(sizes, len(whole) - 1)
    return np.where(words >> np.uint64(63) == 0, sizes, -sizes)


@lru_cache(maxsize=8)
def _tables(sigma: float) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
    """Of sizes 0, 1, …: places up to and with each, cumulated, and what rounding down left of each, cumulated."""
    k = np.arange(math.ceil(_TAIL * sigma) + 1, dtype=np.float64)
    weights = np.exp(-0.5 * (k / sigma) ** 2)
    weights[1:] *= 2  # either sign
    exact = weights * (_PLACES / math.fsum(weights))
    places = np.floor(exact).astype(np.uint64)
    left = exact - np.floor(exact)
    if (over := int(places.sum()) - 2**63) > 0:  # the sum of weights was rounded, by far less than the largest has
        places[places.argmax()] -= np.uint64(over)
    return np.cumsum(places), np.cumsum(left)
