"""A Bᵀ on a CPU, by oneDNN where PyTorch's own products leave half of the processor unused.

PyTorch multiplies float32 matrices by Intel's MKL, which takes AVX2 on AMD's processors also where they have AVX-512;
oneDNN, which PyTorch has for convolutions, takes what there is. Which one depends on the machine alone, so that a
computation repeats to the bit.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor


@cache
def by_onednn() -> bool:
    """Whether float32 products on this machine's CPU are oneDNN's: an AMD with AVX-512, and PyTorch with both."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):  # type: ignore[no-untyped-call]
        return False
    known = torch.backends.cpu.get_cpu_capability() == "AVX512" and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return known and "AMD" in cpu_vendor()


def is_fast(a: Tensor) -> bool:
    """Whether `times_transposed` of such a matrix is oneDNN's, not PyTorch's own product."""
    return a.device.type == "cpu" and a.dtype == torch.float32 and by_onednn()


def times_transposed(a: Tensor, b: Tensor, row: Tensor | None = None) -> Tensor:
    """a bᵀ, plus `row` in every row: [M, K], [N, K] and [N] -> [M, N]."""
    if is_fast(a) and a.numel() and b.numel():
        found: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, row, "none", [], "")
        return found
    return a @ b.mT if row is None else torch.addmm(row, a, b.mT)


def cpu_vendor() -> str:
    """As the system names it: AuthenticAMD, GenuineIntel."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("vendor_id"))
    except (OSError, StopIteration):
        return platform.processor()
