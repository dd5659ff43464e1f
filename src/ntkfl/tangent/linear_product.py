"""A linear layer's part of the full kernel as a product R ↦ J Jᵀ R, made ready once and used hundreds of times.

Rows of J are g_n ⊗ [a_n, 1], with sensitivities g_n [d2, n_out] and inputs a_n [n_in], so that

    J Jᵀ R = S' (Z Zᵀ) S R,   Z = [a, 1],   S: R_n ↦ R_n g_n,   S': X_n ↦ X_n g_nᵀ

Z Zᵀ is one matrix where rows are few, else two products through the weights, 4·N·n_in·n_out operations. S reads all of
g, as many bytes as the inputs, for d2·n_out operations per row: it waits for memory. Two kinds of layer need less.
In the last one every g_n is the identity. In the one before it, g_n = M diag(s_n): the last layer's weights times the
activation's derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ntkfl.tangent.gemm import is_fast, times_transposed

CHUNK = 2**22  # numbers of g looked at together
_FEW = 16  # rows that are looked at first
# Units in the last place that g and M·s may differ by. Five can come of rounding: one of each of the four numbers of g
# that are involved, where rows are scaled, and half a one of the quotient s and of the product.
_ROUNDINGS = 8


class Sensitivities(NamedTuple):
    """S: [N, d2] -> [N, n_out], and S' back."""

    back: Callable[[Tensor], Tensor]
    there: Callable[[Tensor], Tensor]


def linear_product(a: Tensor, g: Tensor, bias: bool) -> Callable[[Tensor], Tensor]:
    """R ↦ J Jᵀ R for inputs a [N, n_in] and sensitivities g [N, d2, n_out]; of a layer with a bias that trains."""
    S = sensitivities(g)
    if len(a) < 2 * a.shape[1]:
        pairs = a @ a.mT
        if bias:
            pairs += 1
        return lambda R: S.there(pairs @ S.back(R))
    if is_fast(a):
        across = a.mT.contiguous()
        return lambda R: S.there(_through_weights_across(a, across, S.back(R), bias))
    return lambda R: S.there(_through_weights(a, S.back(R), bias))


def sensitivities(g: Tensor) -> Sensitivities:
    """The cheapest form of S that is g's, up to a few roundings of each of its numbers."""
    if identical(g):
        return Sensitivities(lambda R: R, lambda X: X)
    found = common_factor(g)
    if found is None:
        return Sensitivities(lambda R: rowwise(R, g), lambda X: rowwise(X, g.mT))
    M, s = found
    return Sensitivities(lambda R: (R @ M).mul_(s), lambda X: (X * s) @ M.mT)


def identical(g: Tensor) -> bool:
    """Whether every g_n is the identity."""
    return g.shape[1] == g.shape[2] and bool((g == torch.eye(g.shape[1], dtype=g.dtype, device=g.device)).all())


def common_factor(g: Tensor) -> tuple[Tensor, Tensor] | None:
    """M [d2, n_out] and s [N, n_out] with g_ncj = M_cj s_nj up to a few roundings of each; None if there are none."""
    N, outputs, units = g.shape
    if outputs < 2 or (N > _FEW and common_factor(g[:_FEW]) is None):
        return None  # g is no larger than s; or a few rows tell
    each = torch.arange(units, device=g.device)
    rows = max(1, CHUNK // (outputs * units))
    row = torch.cat([part.abs().amax(1) for part in torch.split(g, rows)]).argmax(0)
    M = g[row, :, each].mT.contiguous()
    top = M.abs().argmax(0)
    pivot = M[top, each]
    s = g[:, top, each] / torch.where(pivot == 0, 1.0, pivot)
    bound = _ROUNDINGS * torch.finfo(g.dtype).eps
    for part, own in zip(torch.split(g, rows), torch.split(s, rows), strict=True):
        off = torch.addcmul(part, M, own.unsqueeze(1), value=-1).abs_()
        if not float(off.sub_(part.abs(), alpha=bound).amax()) <= 0:
            return None
    return M, s


def rowwise(vectors: Tensor, matrices: Tensor) -> Tensor:
    """A matrix for each row: [..., N, p] and [N, p, q] -> [..., N, q]."""
    if vectors.ndim == 2:  # as rows: three times as fast on a CPU as the same with columns
        return torch.bmm(vectors.unsqueeze(1), matrices).squeeze(1)
    return torch.einsum("...np,npq->...nq", vectors, matrices)


def _through_weights_across(a: Tensor, across: Tensor, inner: Tensor, bias: bool) -> Tensor:
    """The same with the inputs both ways, `across` [n_in, N]: of both factors of a product, rows are contiguous."""
    weight = times_transposed(inner.mT.contiguous(), across)
    return times_transposed(a, weight, inner.sum(0) if bias else None)


def _through_weights(a: Tensor, inner: Tensor, bias: bool) -> Tensor:
    """Z Zᵀ X, the change of the weights in between."""
    weight = inner.mT @ a
    return torch.addmm(inner.sum(0), a, weight.mT) if bias else a @ weight.mT
