"""Bounds on what a minority of Byzantine clients can do to a round: the section `[robust]`, and its statistics.

None can tell a Byzantine client from an honest one whose data are unlike all others', so each also costs something; the
figures are in docs/audit.md. The defaults are off, as in the methods' papers; `Robust.on()` is for deployments.
`sum-ntk-fl` has a bound of its own, always on, as it needs it on heterogeneous data too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.options import Options

_MAJORITY = 3  # clients of whom two can outvote one: of fewer, nobody's numbers measure the others'
UPDATE_LIMIT = 1.5  # of clip: the longest update, in units of the median one's length


class Robust(Options, title="[robust]"):
    """Bounds by kind of reply."""

    updates: Literal["mean", "clip"] = Field("mean", description="updates: their mean, or that with none too long")
    row_clip: float | None = Field(None, gt=0, description="rows: longest Jacobian, in units of the median row's")
    trim_losses: float = Field(
        0.0, ge=0, lt=0.5, description="rows: share of clients left out at both ends of what they report on candidates"
    )

    @staticmethod
    def on(kinds: Collection[str] = ("rows", "update")) -> Robust:
        """The bounds on these kinds of reply, at the values that were chosen on held-out attacks."""
        rows = {"row_clip": 1.5, "trim_losses": 0.4} if "rows" in kinds else {}
        return Robust(updates="clip" if "update" in kinds else "mean", **rows)

    def combine(self, vectors: Sequence[Tensor], p: Tensor, base: Tensor | None = None) -> Tensor:
        """Σ_m p_m v_m of vectors v_m [d]; with "clip" no change v_m − base is longer than 1.5 times the median one."""
        if self.updates == "mean":
            return weighted_sum(vectors, p)
        zero = torch.zeros_like(vectors[0]) if base is None else base
        lengths: Tensor = torch.stack([(v - zero).double().norm() for v in vectors])
        factors = clip_factors(lengths, UPDATE_LIMIT).to(p)
        return weighted_sum([v if f == 1 else zero + f * (v - zero) for v, f in zip(vectors, factors, strict=True)], p)


def weighted_sum(vectors: Sequence[Tensor], p: Tensor) -> Tensor:
    """Σ_m p_m v_m."""
    total = torch.zeros((), dtype=p.dtype, device=p.device)
    for share, vector in zip(p, vectors, strict=True):
        total = total + share * vector
    return total


def clip_factors(lengths: Tensor, most: float) -> Tensor:
    """What scales updates of these lengths [M] down to `most` times the median length, where they are longer: [M]."""
    if len(lengths) < _MAJORITY:
        return torch.ones_like(lengths)
    return (most * median(lengths) / lengths.clamp_min(1e-30)).clamp(max=1)


def fair_counts(counts: Tensor, most: float) -> Tensor:
    """Numbers of samples, or rows, [M], of each client at most `most` times the median client's, and one at least."""
    if len(counts) < _MAJORITY:
        return counts
    return counts.clamp(max=(most * median(counts.double())).clamp_min(1).floor().to(counts))


def median(values: Tensor) -> Tensor:
    """The median along the first dimension; of an even number the mean of the two in the middle."""
    ordered = values.sort(dim=0).values
    n = len(values)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def trimmed_mean(values: Tensor, trim: float) -> Tensor:
    """The mean along the first dimension [n, …] without the ⌊trim·n⌋ largest and as many smallest."""
    n = len(values)
    cut = min(int(trim * n), (n - 1) // 2)
    return values.sort(dim=0).values[cut : n - cut].mean(0)
