"""A Bᵀ on a CPU, by oneDNN where PyTorch's own products leave half of the processor unused.

PyTorch multiplies float32 matrices by Intel's MKL, which takes AVX2 on AMD's processors also where they have AVX-512;
oneDNN, which PyTorch has for convolutions, takes what there is: half the time of a kernel. Which one depends on the
machine alone, so that a computation repeats to the bit.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_STRIP = 64  # rows of a symmetric matrix at a time, on a CPU


@cache
def by_onednn() -> bool:
    """Whether float32 products on this machine's CPU are oneDNN's: an AMD with AVX-512, and PyTorch with both."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):  # type: ignore[no-untyped-call]
        return False
    known = torch.backends.cpu.get_cpu_capability() == "AVX512" and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return known and "AMD" in cpu_vendor()


def is_fast(a: Tensor) -> bool:
    """Whether `times_transposed` of such a matrix is oneDNN's, not PyTorch's own product."""
    tracked = torch.is_grad_enabled() and a.requires_grad  # oneDNN's product has no derivative
    return a.device.type == "cpu" and a.dtype == torch.float32 and not tracked and by_onednn()


def times_transposed(a: Tensor, b: Tensor, row: Tensor | None = None) -> Tensor:
    """a bᵀ, plus `row` in every row: [M, K], [N, K] and [N] -> [M, N]."""
    if is_fast(a) and is_fast(b) and a.numel() and b.numel():
        found: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, row, "none", [], "")
        return found
    return a @ b.mT if row is None else torch.addmm(row, a, b.mT)


def products(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left rightᵀ, [N, k] and [N', k] -> [N, N'], added to `out` if given.

    Where both are one tensor (and `out` is symmetric), what is below the diagonal is taken from above it.
    """
    out = left.new_zeros(len(left), len(right)) if out is None else out
    rows = _STRIP if left is right and left.device.type == "cpu" else max(1, len(left))
    for at in range(0, len(left), rows):
        first = at if left is right else 0
        strip, others = left[at : at + rows], right[first:]
        if is_fast(left):
            out[at : at + rows, first:] += times_transposed(strip, others)
        else:
            out[at : at + rows, first:].addmm_(strip, others.T)
        if left is right:
            out[at + rows :, at : at + rows] = out[at : at + rows, at + rows :].T
    return out


def cpu_vendor() -> str:
    """As the system names it: AuthenticAMD, GenuineIntel."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("vendor_id"))
    except (OSError, StopIteration):
        return platform.processor()
