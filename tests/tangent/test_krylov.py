"""The linear flow in closed form, against eigenvalues and least squares of the dense Jacobian in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.tangent import krylov
from ntkfl.tangent.jacobian import BlockJacobian
from tests.tangent.networks import mlp

TIMES = (0.5, 30.0, 1e4, 1e8, 1e12)


def problem(kind: str, N: int = 12) -> tuple[ntkfl.Jacobian, Tensor, Tensor]:
    torch.manual_seed(2)
    model, x = mlp(4, 30, 3), torch.randn(N, 4, dtype=torch.float64)
    y = torch.randn(N, 3, dtype=torch.float64)
    if kind == "contradictory":  # equal rows with different targets: a singular kernel, and no way to fit them all
        x[N // 2 :] = x[: N - N // 2]
    f0 = model(x).detach()
    return ntkfl.jacobian(model, x), f0, y


def single(J: ntkfl.Jacobian) -> BlockJacobian:
    assert isinstance(J, BlockJacobian)
    return BlockJacobian([b.with_tensors(tuple(t.float() for t in b.tensors())) for b in J.blocks], *J.shape[1:])


def exact(J: ntkfl.Jacobian, f0: Tensor, y: Tensor, lr: float, t: float) -> Tensor:
    """Δw(t) = V (1 − e^{−hσ²t})/σ Uᵀ (y − f0) with J = U σ Vᵀ and h = η/(N d2); singular values of rounding are 0."""
    N, d2, d = J.shape
    U, sigma, Vt = torch.linalg.svd(J.dense().double().reshape(N * d2, d), full_matrices=False)
    kept = sigma > N * d2 * 1e-15 * sigma[0]
    gain = torch.where(kept, -torch.expm1(-lr / (N * d2) * sigma**2 * t) / sigma, 0.0)
    return Vt.T @ (gain * (U.T @ (y - f0).reshape(-1)))


@pytest.mark.parametrize("kind", ["well posed", "contradictory"])
def test_weights_at_any_time(kind: str) -> None:
    J, f0, y = problem(kind)
    e = ntkfl.evolve(J, f0, y, lr=1.0, steps=TIMES, loss="mse")
    assert e.steps == TIMES
    assert not e.statistics.fallback
    assert e.statistics.evaluations <= f0.numel()
    for i, t in enumerate(TIMES):
        truth = exact(J, f0, y, 1.0, t)
        assert (e.delta(i) - truth).norm() < 1e-4 * truth.norm()
        assert (e.outputs[i] - (f0 + J.jvp(truth))).norm() < 1e-4 * (y - f0).norm()


@pytest.mark.parametrize("kind", ["well posed", "contradictory"])
def test_the_limit_is_the_least_squares_solution(kind: str) -> None:
    """The one of smallest norm. Rounding costs eps times the kernel's condition, 10⁵ here, and an output's noise."""
    J, f0, y = problem(kind)
    N, d2, d = J.shape
    A = J.dense().reshape(N * d2, d)
    solution = torch.linalg.lstsq(A, (y - f0).reshape(-1, 1), rcond=1e-12, driver="gelsd").solution.squeeze(1)
    e = ntkfl.evolve(J, f0, y, lr=1.0, steps=[1e13], loss="mse")
    assert (e.delta(0) - solution).norm() < 1e-8 * solution.norm()
    assert (e.outputs[0] - (f0 + J.jvp(solution))).norm() < 1e-8 * (y - f0).norm()


@pytest.mark.parametrize("kind", ["well posed", "contradictory"])
def test_float32_reaches_the_same_limit(kind: str) -> None:
    """Its Jacobian is another by 6·10⁻⁸, so the truth is that one's: what is left is rtol and float32's results."""
    J, f0, y = problem(kind)
    J, f0 = single(J), f0.float()
    e = ntkfl.evolve(J, f0, y, lr=1.0, steps=TIMES, loss="mse")
    assert "products in float64" in e.statistics.fallback
    for i, t in enumerate(TIMES):
        truth = exact(J, f0.double(), y, 1.0, t)
        assert (e.delta(i).double() - truth).norm() < 1e-3 * truth.norm()


def test_a_space_that_would_grow_too_large_is_integrated(monkeypatch: pytest.MonkeyPatch) -> None:
    J, f0, y = problem("well posed")
    monkeypatch.setattr(krylov, "MOST_PRODUCTS", 4)
    e = ntkfl.evolve(J, f0, y, lr=1.0, steps=[300.0], loss="mse", rtol=1e-6)
    assert e.statistics.accepted > 0
    truth = exact(J, f0, y, 1.0, 300.0)
    assert (e.delta(0) - truth).norm() < 1e-3 * truth.norm()


def test_a_residual_in_the_null_space_is_kept_while_it_is_harmless() -> None:
    """Equal rows, opposite targets: R grows as t, and the weights do not move."""
    model, x = nn.Linear(4, 1).double(), torch.ones(2, 4, dtype=torch.float64)
    J, f0 = ntkfl.jacobian(model, x), torch.zeros(2, 1, dtype=torch.float64)
    y = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    e = ntkfl.evolve(J, f0, y, lr=1.0, steps=[9.0, 1e300], loss="mse")
    assert (e.residuals[0] - 9 * y).abs().max() < 1e-12
    assert e.deltas().abs().max() < 1e-12
    assert e.outputs.abs().max() < 1e-12
