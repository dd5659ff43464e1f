"""Top-k: nearest among k-sparse rows, the same on every machine, and indifferent to what it should be."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

import ntkfl
from ntkfl.errors import NumericalError
from ntkfl.privacy import sparsify as module
from ntkfl.privacy.sparsify import kept, sparsify, top_k
from ntkfl.tangent.sparse import SparseBlock


@given(st.integers(0, 9_999), st.integers(1, 10**6))
def test_kept_counts_in_decimals(parts: int, size: int) -> None:
    k = kept(parts / 10_000, size)
    exact = Fraction(10_000 - parts, 10_000) * size
    assert k == 1 or (exact - k <= Fraction(1, 2) and k - exact <= Fraction(1, 2))
    assert 1 <= k <= size
    if exact.denominator == 2:
        assert k > exact


# Integers, so that ties are common and scaling is exact.
matrices = arrays.arrays("float64", st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.integers(-4, 4)).map(
    torch.from_numpy
)


def spread(values: Tensor, positions: Tensor, n: int) -> Tensor:
    return torch.zeros(len(values), n, dtype=values.dtype).scatter_(1, positions, values)


@settings(max_examples=150, deadline=None)
@given(matrices, st.data())
@example(torch.tensor([[0.0, -0.0, 3.0, 0.0]]).double(), None)
def test_what_top_k_promises(rows: Tensor, data: st.DataObject | None) -> None:
    n = rows.shape[1]
    k = 3 if data is None else data.draw(st.integers(1, n))
    values, positions = top_k(rows, k)
    assert values.shape == positions.shape == (len(rows), k)
    assert bool((positions[:, 1:] > positions[:, :-1]).all())
    assert torch.equal(values, rows.gather(1, positions))
    assert not bool(torch.signbit(values[values == 0]).any())
    nearest = spread(values, positions, n)
    for row, ours in zip(rows, nearest, strict=True):
        # No other choice of k places leaves less behind, whatever values stand there.
        best = min(
            float(row.square().sum() - row[list(places)].square().sum())
            for places in itertools.combinations(range(n), k)
        )
        assert float((row - ours).square().sum()) == best
    # The lowest position among equals: the first k by (−magnitude, position).
    for row, found in zip(rows.tolist(), positions.tolist(), strict=True):
        assert found == sorted(sorted(range(n), key=lambda p: (-abs(row[p]), p))[:k])
    again = top_k(nearest, k)
    assert torch.equal(again[0], values)
    assert torch.equal(spread(*again, n), nearest)
    for scale in (3.0, 2.0**-40):
        scaled = top_k(scale * rows, k)
        assert torch.equal(scaled[1], positions)
        assert torch.equal(scaled[0], scale * values)
    assert torch.equal(top_k(-rows, k)[1], positions)


@pytest.mark.parametrize("bad", [float("nan"), float("-nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite(bad: float, dtype: torch.dtype) -> None:
    rows = torch.randn(3, 8, dtype=dtype)
    rows[1, 5] = bad
    with pytest.raises(NumericalError, match="not finite"):
        top_k(rows, 2)


def network() -> tuple[ntkfl.Jacobian, int]:
    J = ntkfl.jacobian(ntkfl.models.mlp(6, 5, 3).double(), torch.randn(7, 6, dtype=torch.float64))
    return J, J.shape[1] * J.shape[2]


@pytest.mark.parametrize("form", ["auto", "dense"])
@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_a_jacobian_of_any_form(form: str, rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(7, 6, dtype=torch.float64)
    J = ntkfl.jacobian(ntkfl.models.mlp(6, 5, 3).double(), x, form=form)
    D = J.dense().flatten(1)
    monkeypatch.setattr(module, "BUDGET", rows_at_once * D.shape[1])
    S = sparsify(J, 0.8)
    assert isinstance(S.blocks[0], SparseBlock)
    assert S.blocks[0].values.shape == (7, kept(0.8, D.shape[1]))
    expected = spread(*top_k(D, kept(0.8, D.shape[1])), D.shape[1])
    assert torch.equal(S.dense().flatten(1), expected)
    assert S.dtype == torch.float64
    assert 0 < float((S.dense() - J.dense()).norm()) < float(J.dense().norm())


def test_no_sparsity_is_the_identity() -> None:
    J, _ = network()
    assert sparsify(J, 0.0) is J
