"""Real numbers as integers modulo 2^32, so that they can be masked and summed exactly.

Numbers of at most `limit` become whole multiples of 1/scale, rounded up or down at random so that the expectation is
the number itself. The scale is the largest power of two with which the sum of `clients` such numbers stays below 2^31:
nothing wraps, and whole numbers stay exact where the scale is at least 1.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ntkfl.crypto.masking import Words
from ntkfl.errors import ConfigError, NumericalError

Floats = NDArray[np.float64]
_MOST = (1 << 31) - 1  # the largest sum that two's complement holds


def scale_of(limit: float, clients: int) -> float:
    """2^e for the largest e with clients · ⌈limit · 2^e⌉ < 2^31."""
    if not (math.isfinite(limit) and limit > 0 and clients >= 1):
        raise ConfigError(f"fixed point needs a limit above 0 and at least one client, got {limit} and {clients}")
    each = _MOST // clients
    if each < 1:
        raise ConfigError(f"{clients} clients are more than a sum of 32 bits has room for")
    exponent = math.frexp(each / limit)[1]
    while math.ceil(math.ldexp(limit, exponent)) > each:
        exponent -= 1
    return math.ldexp(1.0, exponent)


def fit(values: Floats, limit: float) -> tuple[Floats, bool]:
    """The values, scaled down together where one is larger than the limit, and whether they were. [n]"""
    if not bool(np.isfinite(values).all()):
        raise NumericalError("a reply with values that are not finite cannot be summed; this client leaves the round")
    largest = float(np.abs(values).max(initial=0.0))
    if largest <= limit:
        return values, False
    return np.clip(values * (limit / largest), -limit, limit), True


def to_words(values: Floats, scales: Floats, uniforms: Floats) -> Words:
    """⌊values · scales⌋ or one more, the latter with the probability of what the rounding down leaves; modulo 2^32.

    `uniforms` in [0, 1), multiples of 2^-53, decide. All [n].
    """
    scaled = values * scales  # exact: scales are powers of two
    down = np.floor(scaled)
    whole = down.astype(np.int64) + (uniforms < scaled - down)
    return (whole & 0xFFFFFFFF).astype(np.uint32)


def from_words(total: Words, scales: Floats) -> Floats:
    """The sum that the words stand for, as signed numbers, [n]."""
    return total.view(np.int32).astype(np.float64) / scales
