"""Ridge regression of a last linear layer from sums over samples, hence from those of several sets of samples.

With a = (φ, 1) for features φ [F] and targets Y [d2], everything follows from

    n,   G = Σ a aᵀ,   C = Σ a Yᵀ,   q = Σ ‖Y‖².

The bias is not penalised, so the mean m drops out: with S = Σ (φ − m)(φ − m)ᵀ = G_φφ − n m mᵀ and s = tr S / (nF),

    W(λ) = argmin Σ ‖Wᵀφ + b − Y‖² + n λ s ‖W‖² = (S + n λ s I)⁻¹ Σ (φ − m) Yᵀ,     b = Ȳ − Wᵀ m.

λ has no unit: 1 penalises as much as a feature of mean variance explains. The squared error of any weights on any set
of samples is tr(Wᵀ G W) − 2 tr(Wᵀ C) + q: so is that of samples left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkfl.errors import TooFew

PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_SMALL = 1e-12  # a penalty that rounding may outweigh


@dataclass(frozen=True)
class RidgeSums:
    """n [], G [p, p], C [p, d2], q [], in float64; p = F + 1, the 1 of the bias comes last."""

    samples: Tensor
    gram: Tensor
    cross: Tensor
    squares: Tensor

    @staticmethod
    def of(features: Tensor, Y: Tensor) -> RidgeSums:
        """Of samples with features [n, F] and targets [n, d2]; products are in the features' type."""
        Y = Y.to(features)
        a = torch.cat([features, Y.new_ones(len(Y), 1)], dim=1)
        sums = (a.new_tensor(float(len(a))), a.mT @ a, a.mT @ Y, Y.square().sum())
        return RidgeSums(*(part.double() for part in sums))

    def __add__(self, other: RidgeSums) -> RidgeSums:
        return RidgeSums(*(mine + its for mine, its in zip(self.parts(), other.parts(), strict=True)))

    def __sub__(self, other: RidgeSums) -> RidgeSums:
        return RidgeSums(*(mine - its for mine, its in zip(self.parts(), other.parts(), strict=True)))

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """n, G, C, q."""
        return self.samples, self.gram, self.cross, self.squares

    def error(self, weights: Tensor) -> Tensor:
        """Σ ‖weightsᵀ a − Y‖² over the samples, for weights [..., p, d2]: [...]."""
        own = (weights * (self.gram @ weights - 2 * self.cross)).sum((-2, -1))
        return own + self.squares


def total(parts: Sequence[RidgeSums]) -> RidgeSums:
    """The sum, in the order given."""
    if not parts:
        raise TooFew("no sums were given: there must be one at least")
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return result


def solve(sums: RidgeSums, penalty: float) -> Tensor:
    """(W; bᵀ) [p, d2] at λ = penalty. At λ = 0, directions without variance get no weight."""
    if float(sums.samples) < 1:
        raise TooFew("sums over no samples have no solution")
    mean = sums.gram[-1, :-1] / sums.samples
    S = sums.gram[:-1, :-1] - sums.samples * torch.outer(mean, mean)
    cross = sums.cross[:-1] - torch.outer(mean, sums.cross[-1])
    regular = S + penalty * S.diagonal().mean() * torch.eye(len(S), dtype=S.dtype, device=S.device)
    factor, failed = torch.linalg.cholesky_ex(regular)
    if penalty < _SMALL or int(failed):
        W = torch.linalg.pinv(regular, hermitian=True) @ cross
    else:
        W = torch.cholesky_solve(cross, factor)
    return torch.cat([W, (sums.cross[-1] / sums.samples - mean @ W).unsqueeze(0)])


def left_out_errors(parts: Sequence[RidgeSums], whole: RidgeSums, penalties: Sequence[float]) -> Tensor:
    """The mean squared error at each λ of samples that the solution has not seen, [λ]: each of `parts` is left out of
    the `whole` once.
    """
    errors, samples = whole.gram.new_zeros(len(penalties)), 0.0
    for out in parts:
        rest = whole - out
        if float(rest.samples) < 1:
            continue
        errors += out.error(torch.stack([solve(rest, penalty) for penalty in penalties]))
        samples += float(out.samples)
    return errors / max(samples, 1.0)
