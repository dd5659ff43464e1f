"""The flow and the paper's sum, against explicit steps of gradient descent and brute-force sums."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ntkfl
from ntkfl.tangent.losses import targets
from tests.tangent.evolutions import descended, problem
from tests.tangent.networks import mlp


@pytest.mark.parametrize("loss", ["ce", "mse"])
@pytest.mark.parametrize(("kernel", "scheme"), [("full", "flow"), ("trace", "flow"), ("trace", "paper")])
def test_small_steps_of_descent_come_to_the_same(loss: str, kernel: str, scheme: str) -> None:
    """All three sums agree as ηλ/N → 0, apart by the size of a step."""
    _, _, J, f0, y = problem()
    Y, lr, t = targets(y, 3, loss, torch.float64), 0.3, 20
    gaps = []
    for finer in (10, 40):
        f, R = descended(J, f0, Y, lr / finer, t * finer, loss, kernel)
        e = ntkfl.evolve(J, f0, y, lr / finer, [t * finer], loss, kernel, scheme, rtol=1e-8)
        gaps.append(float((e.residuals[0] - R).norm() / R.norm()))
        assert (e.outputs[0] - f).norm() < 0.05 * (f - f0).norm()
    assert gaps[1] < 0.02
    assert gaps[1] < 0.3 * gaps[0]


def test_the_full_kernel_is_descent_on_the_linearised_network() -> None:
    """w ← w − η ∇L of f0 + J (w − w0) in small steps, by autograd on the weights, without any kernel."""
    _, _, J, f0, y = problem()
    D, lr = J.dense(), 0.01
    w = torch.zeros(J.shape[2], dtype=torch.float64)
    for _ in range(400):
        w.requires_grad_()
        (g,) = torch.autograd.grad(nn.functional.cross_entropy(f0 + D @ w, y), w)
        w = (w - lr * g).detach()
    e = ntkfl.evolve(J, f0, y, lr=lr, steps=[400])
    assert (e.delta(0) - w).norm() < 0.01 * w.norm()
    assert (e.outputs[0] - (f0 + D @ w)).norm() < 0.01 * (D @ w).norm()


class TestPaperScheme:
    def test_equals_the_brute_force_sum(self) -> None:
        _, _, J, f0, y = problem()
        Y, lr, N, d2 = targets(y, 3, "mse", torch.float64), 0.7, 7, 3
        H = J.kernel()
        R = torch.zeros_like(f0)
        expected = {}
        for u in range(40):
            R = R + (Y - (Y + torch.linalg.matrix_exp(-lr * u / (N * d2) * H) @ (f0 - Y))) / d2
            expected[u + 1] = R
        e = ntkfl.evolve(J, f0, y, lr=lr, steps=[1, 5, 40], loss="mse", kernel="trace", scheme="paper")
        for i, t in enumerate([1, 5, 40]):
            assert (e.residuals[i] - expected[t]).abs().max() < 1e-12 * max(1.0, t)
            f = Y + torch.linalg.matrix_exp(-lr * t / (N * d2) * H) @ (f0 - Y)
            assert (e.outputs[i] - f).abs().max() < 1e-12

    def test_singular_kernel_accumulates_linearly_where_the_eigenvalue_is_zero(self) -> None:
        model = mlp(4, 3)
        x = torch.zeros(2, 4, dtype=torch.float64)  # two equal rows: H = [[1, 1], [1, 1]]
        J = ntkfl.jacobian(model, x)
        f0, Y = torch.zeros(2, 3).double(), torch.tensor([[1.0, 0, 0], [-1.0, 0, 0]]).double()
        for scheme in ("flow", "paper"):
            e = ntkfl.evolve(J, f0, Y, lr=1.0, steps=[9], loss="mse", kernel="trace", scheme=scheme)
            assert (e.residuals[0] - 9 * Y / 3).abs().max() < 1e-9

    @pytest.mark.parametrize("lr", [0.3, 4.0])
    def test_cross_entropy_is_the_explicit_sum_over_whole_steps(self, lr: float) -> None:
        """R(t) = Σ_{u<t} (Y − softmax f(u)), f' = (η/N) H (Y − softmax f) in 200 small steps between whole ones."""
        _, _, J, f0, y = problem()
        H, Y = J.kernel() * (lr / len(f0)), targets(y, 3, "ce", torch.float64)
        f, R, h, expected = f0, torch.zeros_like(f0), 1 / 200, {}
        for u in range(30):
            R = R + (Y - f.softmax(1))
            for _ in range(200):
                middle = f + h / 2 * H @ (Y - f.softmax(1))
                f = f + h * H @ (Y - middle.softmax(1))
            expected[u + 1] = (f, R)
        kwargs = {"lr": lr, "steps": [1, 4, 30], "loss": "ce", "kernel": "trace", "rtol": 1e-6}
        e = ntkfl.evolve(J, f0, y, scheme="paper", **kwargs)  # type: ignore[arg-type]
        for i, t in enumerate([1, 4, 30]):
            assert (e.outputs[i] - expected[t][0]).norm() < 1e-4 * (expected[t][0] - f0).norm()
            assert (e.residuals[i] - expected[t][1]).norm() < 1e-4 * expected[t][1].norm()
        assert (e.residuals[0] - (Y - f0.softmax(1))).abs().max() < 1e-14  # t = 1 has u = 0 alone
        flow = ntkfl.evolve(J, f0, y, **kwargs)  # type: ignore[arg-type]
        assert (e.delta(2) - flow.delta(2)).norm() > 0.005 * flow.delta(2).norm()  # a sum is no integral
        assert e.statistics.evaluations < 3 * flow.statistics.evaluations  # nor does each whole step take a product

    def test_mean_squares_by_integration_are_the_closed_form(self) -> None:
        """A loss that is not known to be `mse` is integrated, and sums to the same."""
        _, _, J, f0, y = problem()
        Y = targets(y, 3, "mse", torch.float64)
        kwargs = {"lr": 2.0, "steps": [3, 25], "kernel": "trace", "scheme": "paper", "rtol": 1e-6}
        closed = ntkfl.evolve(J, f0, Y, loss="mse", **kwargs)  # type: ignore[arg-type]
        summed = ntkfl.evolve(J, f0, Y, loss=lambda f, Y: 0.5 * (f - Y).square().mean(-1), **kwargs)  # type: ignore[arg-type]
        assert (closed.residuals - summed.residuals).norm() < 1e-4 * closed.residuals.norm()
