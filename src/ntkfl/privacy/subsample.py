"""Subsampling: a client of the round uses a part β of its samples, drawn uniformly without replacement."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from ntkfl.errors import ConfigError


def subsample(count: int, rate: float, generator: random.Random) -> Tensor:
    """Indices of max(1, round(β·n)) of n samples, ascending; all of them at β = 1, without a draw. int64 [n'].

    A deployed client gives `random.SystemRandom()`: whoever knew the generator would know which samples were used.
    """
    if not 0 < rate <= 1:
        raise ConfigError(f"the subsampling rate must lie in (0, 1], got {rate}")
    if count < 1:
        raise ConfigError("there is nothing to sample from")
    if rate == 1:
        return torch.arange(count)
    wanted = max(1, math.floor(rate * count + 0.5))
    return torch.tensor(sorted(generator.sample(range(count), wanted)))
