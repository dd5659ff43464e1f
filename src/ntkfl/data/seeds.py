"""One random stream for each use of a seed."""

from __future__ import annotations

from numbers import Integral

import numpy as np

from ntkfl.errors import ConfigError


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A stream determined by `seed` and `purpose`: one seed may serve a partition and a hold-out without tying them."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
        raise ConfigError(f"seed must be a non-negative integer, not {seed!r}")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([int(seed), *purpose.encode()])))
