"""Subsampling: which of its samples a client uses in a round, and how many rows every client sends."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor


def subsample(count: int, rate: float, generator: random.Random, most: int | None = None) -> Tensor:
    """Subsampling: a client of the round uses a part β of its samples, drawn uniformly without replacement; through a
    shuffler, no more of them than every client sends.

    Indices of max(1, round(β·n)) of n samples, ascending; all of them at β = 1, without a draw. int64 [n']. Where those
    are more than `most`, that many of them, drawn again.

    A deployed client gives `random.SystemRandom()`: whoever knew the generator would know which samples were used.
    """
    if rate == 1 and (most is None or count <= most):
        return torch.arange(count)
    wanted = eligible(count, rate)
    rows = list(range(count)) if rate == 1 else generator.sample(range(count), wanted)
    if most is not None and len(rows) > most:
        rows = generator.sample(sorted(rows), most)
    return torch.tensor(sorted(rows))


def eligible(count: int, rate: float) -> int:
    """max(1, round(β·n)), the samples that a client of n uses in a round."""
    return max(1, math.floor(rate * count + 0.5))


def equal_rows(sizes: Sequence[int], rate: float) -> int:
    """A number of rows for every client to send, from all clients' sizes: what the largest has, so that none loses any;
    but 1.5 times the median's at most, so that none weighs much more than the others.
    """
    counts = sorted(eligible(size, rate) for size in sizes)
    return min(counts[-1], math.ceil(1.5 * counts[len(counts) // 2]))
