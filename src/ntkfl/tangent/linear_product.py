"""A linear layer's part of the full kernel as a product R ↦ J Jᵀ R, made ready once and used hundreds of times.

Rows of J are g_n ⊗ [a_n, 1], with sensitivities g_n [d2, n_out] and inputs a_n [n_in], so that

    J Jᵀ R = S' (Z Zᵀ) S R,   Z = [a, 1],   S: R_n ↦ R_n g_n,   S': X_n ↦ X_n g_nᵀ

Z Zᵀ is one matrix where rows are few, else two products through the weights, 4·N·n_in·n_out operations. S reads all of
g, as many bytes as the inputs, for d2·n_out operations per row: it waits for memory. Two kinds of layer need less.
In the last one every g_n is the identity. In the one before it, g_n = M diag(s_n): the last layer's weights times the
activation's derivatives. Together they save a quarter of an MLP's flow.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ntkfl.tangent.gemm import is_fast, times_transposed

# Units in the last place that g and M·s may differ by. Five can come of rounding: one of each of the four numbers of g
# that are involved, where rows are scaled, and half a one of the quotient s and of the product.
_ROUNDINGS = 8
Map = Callable[[Tensor], Tensor]


def linear_product(a: Tensor, g: Tensor, bias: bool) -> Map:
    """R ↦ J Jᵀ R for inputs a [N, n_in] and sensitivities g [N, d2, n_out]; of a layer with a bias that trains."""
    back, there = sensitivities(g)
    if len(a) < 2 * a.shape[1]:
        pairs = a @ a.mT + float(bias)
        return lambda R: there(pairs @ back(R))
    across = a.mT.contiguous() if is_fast(a) else a.mT  # oneDNN wants the rows of both factors contiguous

    def product(R: Tensor) -> Tensor:
        X = back(R)
        weight = times_transposed(X.mT.contiguous(), across) if is_fast(a) else X.mT @ a
        return there(times_transposed(a, weight, X.sum(0) if bias else None))

    return product


def sensitivities(g: Tensor) -> tuple[Map, Map]:
    """S [N, d2] -> [N, n_out] and S' back, in the cheapest form that is g's up to a few roundings of each number."""
    if g.shape[1] == g.shape[2] and bool((g == torch.eye(g.shape[1], dtype=g.dtype, device=g.device)).all()):
        return lambda R: R, lambda X: X
    if (found := common_factor(g)) is not None:
        M, s = found
        return lambda R: (R @ M).mul_(s), lambda X: (X * s) @ M.mT
    return lambda R: rowwise(R, g), lambda X: rowwise(X, g.mT)


def common_factor(g: Tensor) -> tuple[Tensor, Tensor] | None:
    """M [d2, n_out] and s [N, n_out] with g_ncj = M_cj s_nj up to a few roundings of each; None if there are none.

    M is for each unit j the row in which g is largest, so that a unit that is dead in some rows gets its M from others.
    """
    if g.shape[1] < 2:
        return None  # g is no larger than s
    each = torch.arange(g.shape[2], device=g.device)
    M = g[g.abs().amax(1).argmax(0), :, each].mT.contiguous()
    top = M.abs().argmax(0)
    pivot = M[top, each]
    s = g[:, top, each] / torch.where(pivot == 0, 1.0, pivot)
    off = torch.addcmul(g, M, s.unsqueeze(1), value=-1).abs_()
    bound = _ROUNDINGS * torch.finfo(g.dtype).eps
    return (M, s) if bool((off <= bound * g.abs()).all()) else None


def rowwise(vectors: Tensor, matrices: Tensor) -> Tensor:
    """A matrix for each row: [..., N, p] and [N, p, q] -> [..., N, q]."""
    if vectors.ndim == 2:  # as rows: three times as fast on a CPU as the same with columns
        return torch.bmm(vectors.unsqueeze(1), matrices).squeeze(1)
    return torch.einsum("...np,npq->...nq", vectors, matrices)
