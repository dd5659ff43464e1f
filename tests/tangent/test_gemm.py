"""Products by either library are those of float64, up to what rounding may do to sums of so many terms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ntkfl.tangent import gemm

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]
BOTH = pytest.mark.parametrize(
    "onednn", [False, pytest.param(True, marks=pytest.mark.skipif(not ONEDNN, reason="PyTorch without oneDNN"))]
)


def off(found: Tensor, a: Tensor, b: Tensor, row: Tensor | None = None) -> float:
    """The largest error in units of its bound: K + 1 roundings of Σ |a| |b|, whatever the order of the sum."""
    exact = a.double() @ b.double().T + (0 if row is None else row.double())
    size = a.double().abs() @ b.double().abs().T + (0 if row is None else row.double().abs())
    bound = (a.shape[1] + 1) * torch.finfo(a.dtype).eps * size
    return float(((found.double() - exact).abs() / bound).max())


@BOTH
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 5), (64, 785, 100), (100, 1000, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_is_as_exact_as_its_sums(
    shape: tuple[int, int, int], dtype: torch.dtype, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "by_onednn", lambda: onednn)
    torch.manual_seed(0)
    M, K, N = shape
    a, b, row = torch.randn(M, K, dtype=dtype), torch.randn(N, K, dtype=dtype), torch.randn(N, dtype=dtype)
    assert off(gemm.times_transposed(a, b), a, b) < 1
    assert off(gemm.times_transposed(a, b, row), a, b, row) < 1
    across = a.T.contiguous().T  # columns are contiguous, rows are not
    assert off(gemm.times_transposed(across, b), a, b) < 1
    assert off(gemm.times_transposed(a[M // 2 :], b[:1]), a[M // 2 :], b[:1]) < 1


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False)],
)
@pytest.mark.skipif(not ONEDNN or not torch.backends.mkl.is_available(), reason="PyTorch without oneDNN or MKL")
def test_which_machines_take_onednn(
    vendor: str, capability: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "cpu_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert gemm.by_onednn.__wrapped__() == expected
