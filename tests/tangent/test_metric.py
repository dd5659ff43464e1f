"""The metric against dense algebra, and products of Jacobians taken in few backward passes against the Jacobian."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from ntkfl.tangent import Sums, curvature_sums, jacobian, plan_jacobian
from ntkfl.tangent.curvature import LARGEST
from ntkfl.tangent.flow import Metric
from ntkfl.tangent.sums import DIAGONAL, GRADIENT, SAMPLES, SKETCH, Shaped
from tests.tangent.networks import build
from tests.tangent.test_curvature import NETWORKS, made_up

DAMPING = 0.01
KNOWN = NETWORKS | {name: build(name) for name in ("sequence", "functional use", "tied weight")}


def taken(model: nn.Module, x: Tensor, largest: int = LARGEST) -> Sums:
    return curvature_sums(model, x, made_up(model, x), "ce", plan_jacobian(model, x), largest=largest)


def dense(factor: Tensor, form: str, samples: Tensor) -> Tensor:
    """[n, n] of a factor's mean with one group."""
    if form == DIAGONAL:
        return torch.diag(factor[0] / samples)
    n = (math.isqrt(8 * factor.shape[1] + 1) - 1) // 2
    i, j = torch.triu_indices(n, n)
    square = torch.zeros(n, n, dtype=factor.dtype)
    square[i, j] = square[j, i] = factor[0] / samples
    return square


def by_kronecker(shaped: Shaped, gradient: Tensor, samples: Tensor) -> Tensor:
    """(A + π√λ)⊗(G + √λ/π) inverted as one dense matrix, on a layer's part of the gradient: [n, m]."""
    _, n, m = shaped.shape
    own = shaped.layer.matrices(gradient, 1, n)[0]
    assert shaped.inputs is not None
    A = dense(shaped.inputs.values, shaped.inputs.form, samples)
    if shaped.outputs is None:
        return torch.linalg.solve(A + DAMPING * torch.eye(m).double(), own.T).T
    G = dense(shaped.outputs.values, shaped.outputs.form, samples)
    G = G / G.trace() if shaped.shared else G
    pi = math.sqrt((A.trace() / m) / (G.trace() / n))
    whole = torch.kron(
        G + math.sqrt(DAMPING) / pi * torch.eye(n).double(), A + pi * math.sqrt(DAMPING) * torch.eye(m).double()
    )
    return torch.linalg.solve(whole, own.reshape(-1)).view(n, m)


@pytest.mark.parametrize("name", KNOWN)
def test_it_is_the_dense_damped_inverse(name: str) -> None:
    model, x = KNOWN[name]
    torch.manual_seed(0)
    sums = taken(model, x)
    d = sums.arrays[GRADIENT].numel()
    gradient = torch.randn(d, dtype=torch.float64)
    found, checked = Metric(sums, DAMPING)(gradient), 0
    for shaped in sums.layers():
        if shaped.shape[0] == 1:
            ours = shaped.layer.matrices(found, 1, shaped.shape[1])[0]
            expected = by_kronecker(shaped, gradient, sums.arrays[SAMPLES])
            assert torch.allclose(ours, expected, rtol=1e-7, atol=1e-9 * float(expected.abs().max()))
            checked += 1
    assert checked


def test_a_sketch_of_all_columns_is_nearly_the_whole_factor() -> None:
    """With as many directions as the factor's rank, Nyström's approximation is exact up to its shift."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(40, 3)).double(), torch.randn(5, 40, dtype=torch.float64)
    whole, sketched = taken(model, x), taken(model, x, largest=20)
    assert any(name.endswith(SKETCH) for name in sketched.arrays)
    gradient = torch.randn(123, dtype=torch.float64)
    ours, exact = Metric(sketched, DAMPING)(gradient), Metric(whole, DAMPING)(gradient)
    assert float((ours - exact).norm()) < 0.05 * float(exact.norm())


def test_half_precision_leaves_it_positive() -> None:
    """A factor of rank 1 with entries rounded to 11 bits is indefinite: no gradient may come back reversed."""
    torch.manual_seed(0)
    model, x = nn.Linear(60, 2), 30 * torch.randn(1, 60)
    sums = curvature_sums(model, x, torch.tensor([[1.0, 0.0]]), "ce", plan_jacobian(model, x))
    rounded = Sums({name: array.half().to(array) for name, array in sums.arrays.items()})
    metric = Metric(rounded, 1e-9)
    for _ in range(20):
        gradient = torch.randn(122)
        assert float(gradient @ metric(gradient)) > 0


@pytest.mark.parametrize("form", ["auto", "dense"])
@pytest.mark.parametrize("name", KNOWN)
def test_a_contracted_jacobian_is_the_product(name: str, form: str) -> None:
    """S J of every sample, whether a layer has factors or not."""
    model, x = KNOWN[name]
    torch.manual_seed(0)
    J = jacobian(model, x, form).dense()
    S = torch.randn(len(x), 2, J.shape[1], dtype=torch.float64)
    ours = jacobian(model, x, form, contract=S).dense()
    assert ours.shape == (len(x), 2, J.shape[2])
    assert float((ours - S @ J).abs().max()) < 1e-10 * max(1.0, float(J.abs().max()))
