"""Products by either library are those of float64, up to what rounding may do to sums of so many terms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ntkfl.tangent import blocks

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]


def off(found: Tensor, a: Tensor, b: Tensor, row: Tensor | None = None) -> float:
    """The largest error in units of its bound: K + 1 roundings of Σ |a| |b|, whatever the order of the sum."""
    exact = a.double() @ b.double().T + (0 if row is None else row.double())
    size = a.double().abs() @ b.double().abs().T + (0 if row is None else row.double().abs())
    bound = (a.shape[1] + 1) * torch.finfo(a.dtype).eps * size
    return float(((found.double() - exact).abs() / bound).max())


@pytest.mark.parametrize("onednn", [False, pytest.param(True, marks=pytest.mark.skipif(not ONEDNN, reason="oneDNN"))])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 5), (64, 785, 100), (100, 1000, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_is_as_exact_as_its_sums(
    shape: tuple[int, int, int], dtype: torch.dtype, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "by_onednn", lambda: onednn)
    torch.manual_seed(0)
    M, K, N = shape
    a, b, row = torch.randn(M, K, dtype=dtype), torch.randn(N, K, dtype=dtype), torch.randn(N, dtype=dtype)
    for left, right, added in [
        (a, b, None), (a, b, row), (a.T.contiguous().T, b, row), (a, b.T.contiguous().T, None),
        (a.T.contiguous().T, b.T.contiguous().T, row), (a[M // 2 :], b[:1], None),
    ]:  # fmt: skip
        assert off(blocks.times_transposed(left, right, added), left, right, added) < 1
    square = blocks.row_products(a, a)
    assert off(square, a, a) < 1
