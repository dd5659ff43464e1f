"""Top-k sparsification: of each sample's Jacobian, only the entries of largest magnitude are sent.

Of all matrices with k entries a row, the nearest to J in Frobenius norm. It compresses, and it hides little by itself:
values and positions that are sent are exact.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from ntkfl.errors import NumericalError
from ntkfl.tangent.jacobian import Jacobian
from ntkfl.tangent.sparse import SparseBlock

BUDGET = 2**20  # numbers that are dense at a time: they stay in a CPU's cache


def kept(sparsity: float, size: int) -> int:
    """k, how many of `size` entries remain at a sparsity of [0, 1): (1 − sparsity)·size rounded half up, at least 1.

    The sparsity counts as the decimal number it is written as: 0.97 of 211,100 leaves 6,333.
    """
    exact = (1 - Fraction(repr(float(sparsity)))) * size
    return max(1, math.floor(exact + Fraction(1, 2)))


def top_k(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k entries of largest magnitude of each of rows [N, n]: values [N, k], and positions [N, k], increasing.

    Of equal magnitudes at the edge those at the lowest positions are kept, on every device. Such ties are common: the
    last layer's derivatives are the same for every output. So too is a row of fewer than k entries that are not zero
    filled up by its first zeros, and k is the same for every row.
    """
    rows = rows.detach()
    if not len(rows):
        return rows.new_empty(0, k), torch.empty(0, k, dtype=torch.int64, device=rows.device)
    positions = _select(rows.cpu(), k).to(rows.device)
    return rows.gather(1, positions) + 0.0, positions  # + 0.0: no minus zero, so that equal rows are equal bytes


def sparsify(J: Jacobian, sparsity: float) -> Jacobian:
    """J with the smallest entries of each sample's [d2, d] matrix left out, in sparse form; J itself at sparsity 0.

    Costs J's dense form, but holds only some rows of it at a time.
    """
    N, d2, d = J.shape
    k = kept(sparsity, d2 * d)
    if sparsity == 0:
        return J
    step = max(1, BUDGET // (d2 * d))
    values = torch.empty(N, k, dtype=J.dtype, device=J.device)
    positions = torch.empty(N, k, dtype=torch.int32 if d2 * d < 2**31 else torch.int64, device=J.device)
    for i in range(0, N, step):
        values[i : i + step], positions[i : i + step] = top_k(J[i : i + step].dense().flatten(1), k)
    return Jacobian([SparseBlock(values, positions, d2, d)], d2, d)


def _select(rows: Tensor, k: int) -> Tensor:
    """Positions [N, k], a row at a time: numpy partitions integers six times as fast as torch does anything like it."""
    n = rows.shape[1]
    positions = np.empty((len(rows), k), dtype=np.int64)
    for row, out in zip(rows.numpy(), positions, strict=True):
        magnitudes = np.abs(row)
        bits = magnitudes.view(f"i{magnitudes.itemsize}")  # numbers from 0 on are in the order of their bits
        ordered = np.partition(bits, n - k)
        if ordered[n - k :].max() >= np.array(np.inf, magnitudes.dtype).view(bits.dtype):  # NaNs lie beyond infinity
            raise NumericalError("a row to sparsify has values that are not finite: the training diverged")
        edge = ordered[n - k]
        keep = np.flatnonzero(bits >= edge)
        if len(keep) > k:
            tied = np.flatnonzero(bits[keep] == edge)
            keep = np.delete(keep, tied[k - len(keep) :])
        out[:] = keep
    return torch.from_numpy(positions)
