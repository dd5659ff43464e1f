"""The flow along summed curvature: least squares, ridge regression and the matrix exponential are its oracles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.tangent import Flow
from tests.tangent.networks import build
from tests.tangent.test_curvature import made_up, sums


def linear_problem() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A linear model, its flat weights, inputs with a 1 behind them, and targets."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    x, Y = torch.randn(40, 5, dtype=torch.float64), torch.randn(40, 3, dtype=torch.float64)
    return model, torch.cat([x, torch.ones(40, 1, dtype=torch.float64)], dim=1), x, Y


def weights(model: nn.Module, change: Tensor) -> Tensor:
    """[3, 6], the bias as the last column."""
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()]) + change
    return torch.cat([flat[:15].view(3, 5), flat[15:].unsqueeze(1)], dim=1)


def test_the_end_of_the_flow_is_least_squares_and_with_damping_ridge_regression() -> None:
    model, X, x, Y = linear_problem()
    flow = Flow(sums(model, x, Y, "mse"))
    solved = torch.linalg.lstsq(X, Y).solution.T
    assert torch.allclose(weights(model, flow.change(None, 1.0, 0.0)), solved, atol=1e-10)
    assert torch.allclose(weights(model, flow.change(1e6, 1.0, 0.0)), solved, atol=1e-10)
    delta, start = 0.3, weights(model, torch.zeros(18).double())
    # argmin (1/N) Σ ‖y − W x‖² / (2·3) + δ/2 ‖W − W_0‖²
    left = X.T @ X / (40 * 3) + delta * torch.eye(6).double()
    ridge = torch.linalg.solve(left, X.T @ Y / (40 * 3) + delta * start.T).T
    assert torch.allclose(weights(model, flow.change(None, 1.0, delta)), ridge, atol=1e-10)


def test_fewer_samples_than_weights_move_no_direction_without_curvature() -> None:
    model, X, x, Y = linear_problem()
    change = Flow(sums(model, x[:3], Y[:3], "mse")).change(None, 1.0, 0.0)
    start = weights(model, torch.zeros(18).double())
    least = (torch.linalg.pinv(X[:3]) @ (Y[:3] - X[:3] @ start.T)).T
    assert torch.allclose(weights(model, change) - start, least, atol=1e-9)


def test_the_flow_between_its_ends() -> None:
    """t → 0 gives nothing, then −t g; in between the matrix exponential, and the same as the kernel's evolution."""
    model, _, x, Y = linear_problem()
    found = sums(model, x, Y, "mse")
    flow, g = Flow(found), found.arrays["gradient"] / len(x)
    assert not flow.change(0.0, 1.0, 0.0).any()
    assert torch.allclose(flow.change(1e-7, 1.0, 0.0), -1e-7 * g, rtol=1e-6, atol=0)
    J = ntkfl.jacobian(model, x)
    dense = J.dense()
    C = torch.einsum("njd,nje->de", dense, dense) / (3 * len(x))
    for t in (0.5, 5.0):
        expected = torch.linalg.solve(C, (torch.matrix_exp(-t * C) - torch.eye(18).double()) @ g)
        assert torch.allclose(flow.change(t, 1.0, 0.0), expected, atol=1e-10)
    with torch.no_grad():
        rows = ntkfl.evolve(J, model(x), Y, lr=1.0, steps=(5.0,), loss="mse", kernel="full", rtol=1e-7)
    assert torch.allclose(rows.delta(0), flow.change(5.0, 1.0, 0.0), atol=1e-5)


def test_large_mu_is_a_small_step_and_delta_damps() -> None:
    model, x = build("unknown layer")
    flow = Flow(sums(model, x, made_up(model, x)))
    sizes = [float(flow.change(None, mu, 0.01).norm()) for mu in (1, 4, 16, 64)]
    assert sizes == sorted(sizes, reverse=True)
    g = sums(model, x, made_up(model, x)).arrays["gradient"] / len(x)
    assert torch.allclose(flow.change(None, 1.0, 1e6), -1e-6 * g, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["deep tanh", "unknown layer"])  # of layers alone, and with weights beside them
@pytest.mark.parametrize("time", [None, 3.0])
def test_lengths_of_steps_are_those_of_the_steps(name: str, time: float | None) -> None:
    model, x = build(name)
    flow = Flow(sums(model, x, made_up(model, x)))
    d = sum(p.numel() for p in model.parameters())
    gradients = list(torch.randn(3, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    steps = torch.stack([flow.driven_by(g).change(time, 4.0, 0.01) for g in gradients])
    assert torch.allclose(flow.step_lengths(gradients, time, 4.0, 0.01), steps.norm(dim=1), rtol=1e-10, atol=0)
