"""Matrix products that everything here is made of.

PyTorch multiplies float32 matrices by Intel's MKL, which takes AVX2 on AMD's processors also where they have AVX-512.
oneDNN, which PyTorch has for convolutions, takes what there is: half the time of a kernel or a flow. Which of the two
is called depends on the machine alone, so that a computation repeats to the bit.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_STRIP = 64  # rows of a symmetric matrix at a time, on a CPU
_CPUINFO = Path("/proc/cpuinfo")


@cache
def by_onednn() -> bool:
    """Whether float32 products on this machine's CPU are oneDNN's: an AMD with AVX-512, under Linux."""
    known = torch.backends.cpu.get_cpu_capability() == "AVX512" and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return known and _CPUINFO.exists() and "AuthenticAMD" in _CPUINFO.read_text()


def times_transposed(a: Tensor, b: Tensor, row: Tensor | None = None) -> Tensor:
    """a bᵀ, plus `row` in every row: [M, K], [N, K] and [N] -> [M, N]."""
    single = a.dtype == torch.float32 and a.device.type == "cpu" and a.numel() and b.numel()
    tracked = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)  # oneDNN's product has no derivative
    if single and not tracked and by_onednn():
        found: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, row, "none", [], "")
        return found
    return a @ b.mT if row is None else torch.addmm(row, a, b.mT)


def row_products(left: Tensor, right: Tensor) -> Tensor:
    """left rightᵀ, [N, k] and [N', k] -> [N, N']. Of one tensor with itself only the upper half is computed."""
    if left is not right or left.device.type != "cpu":
        return times_transposed(left, right)
    out = left.new_empty(len(left), len(left))
    for at in range(0, len(left), _STRIP):
        strip = times_transposed(left[at : at + _STRIP], left[at:])
        out[at : at + _STRIP, at:], out[at:, at : at + _STRIP] = strip, strip.T
    return out


def rowwise(vectors: Tensor, matrices: Tensor) -> Tensor:
    """A matrix for each row: [..., N, p] and [N, p, q] -> [..., N, q]."""
    if vectors.ndim == 2:  # as rows: three times as fast on a CPU as the same with columns
        return torch.bmm(vectors.unsqueeze(1), matrices).squeeze(1)
    return torch.einsum("...np,npq->...nq", vectors, matrices)
