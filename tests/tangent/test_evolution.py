"""The flow against explicit oracles: closed forms and tight integration."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.tangent.losses import per_sample, targets
from ntkfl.tangent.parameters import flatten, load_flat, unflatten, with_values
from tests.tangent.evolutions import STEPS, classical, problem, rk4
from tests.tangent.networks import build, mlp


@pytest.mark.parametrize("loss", ["ce", "mse"])
@pytest.mark.parametrize("kernel", ["full", "trace"])
@pytest.mark.parametrize("lr", [0.05, 2.0])
def test_flow_equals_tightly_integrated_flow(loss: str, kernel: str, lr: float) -> None:
    _, _, J, f0, y = problem()
    Y = targets(y, 3, loss, torch.float64)
    e = ntkfl.evolve(J, f0, y, lr=lr, steps=STEPS, loss=loss, kernel=kernel)
    for i, t in enumerate(STEPS):
        f, R = rk4(J, f0, Y, lr, t, loss, kernel)
        assert (e.outputs[i] - f).norm() < 1e-3 * (f - f0).norm()
        assert (e.residuals[i] - R).norm() < 1e-3 * R.norm()
        delta = lr / len(f0) * J.vjp(R)
        assert (e.delta(i) - delta).norm() < 1e-3 * delta.norm()
    # The same sums of N·d2 terms in another order: each is within N·d2·eps of the sum of the terms' sizes.
    sizes = lr / len(f0) * torch.einsum("njd,nj->d", J.dense().abs(), e.residuals[1].abs())
    assert ((e.deltas()[1] - e.delta(1)).abs() <= 2 * f0.numel() * torch.finfo(torch.float64).eps * sizes).all()


def test_the_flow_of_mse_is_its_closed_form() -> None:
    """Δw(t) = V (1 − e^{−hσ²t})/σ Uᵀ (Y − f0) with J = U σ Vᵀ and h = η/(N d2)."""
    _, _, J, f0, y = problem()
    N, d2, d = J.shape
    U, sigma, Vt = torch.linalg.svd(J.dense().reshape(N * d2, d), full_matrices=False)
    steps = (0.5, 30.0, 1e3)
    e = ntkfl.evolve(J, f0, y, lr=1.0, steps=steps, loss="mse", rtol=1e-6)
    for i, t in enumerate(steps):
        gain = -torch.expm1(-sigma.square() * t / (N * d2)) / sigma
        truth = Vt.T @ (gain * (U.T @ (targets(y, d2, "mse", f0.dtype) - f0).reshape(-1)))
        assert (e.delta(i) - truth).norm() < 1e-4 * truth.norm()
        assert (e.outputs[i] - (f0 + J.jvp(truth))).norm() < 1e-4 * (e.outputs[i] - f0).norm()


def test_flow_converges_with_its_tolerance() -> None:
    _, _, J, f0, y = problem()
    _, R = rk4(J, f0, targets(y, 3, "ce", torch.float64), 2.0, 40.0, "ce", "full")
    errors = [
        float((ntkfl.evolve(J, f0, y, lr=2.0, steps=[40], rtol=rtol).residuals[0] - R).norm() / R.norm())
        for rtol in (1e-3, 1e-5, 1e-7)
    ]
    assert errors[0] > 5 * errors[1] > 25 * errors[2]
    assert errors[2] < 1e-5


@pytest.mark.parametrize("loss", ["ce", "mse"])
@pytest.mark.parametrize("kernel", ["full", "trace"])
def test_shuffled_rows_leave_the_weight_change_as_it_was(loss: str, kernel: str) -> None:
    _, _, J, f0, y = problem()
    order = torch.randperm(7)
    plain = ntkfl.evolve(J, f0, y, lr=1.0, steps=STEPS, loss=loss, kernel=kernel)
    shuffled = ntkfl.evolve(J[order], f0[order], y[order], lr=1.0, steps=STEPS, loss=loss, kernel=kernel)
    for i in range(len(STEPS)):
        # The power iteration starts from other numbers, so steps differ within the tolerance.
        assert (plain.delta(i) - shuffled.delta(i)).norm() < 2e-3 * plain.delta(i).norm()


@pytest.mark.parametrize("loss", ["ce", "mse"])
@pytest.mark.parametrize("kernel", ["full", "trace"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_to_learn_costs_nothing(loss: str, kernel: str, dtype: torch.dtype) -> None:
    """Targets that are the outputs, up to the rounding of a softmax."""
    model, x = build("relu")
    f0 = model.to(dtype)(x.to(dtype)).detach()
    y = f0.softmax(dim=1) if loss == "ce" else f0.clone()
    e = ntkfl.evolve(ntkfl.jacobian(model, x.to(dtype)), f0, y, lr=1.0, steps=STEPS, loss=loss, kernel=kernel)
    assert e.statistics.evaluations == 0
    assert e.steps == STEPS
    assert torch.equal(e.outputs, f0.expand(4, -1, -1))
    assert not e.deltas().any()


def test_a_small_residual_is_learnt_from() -> None:
    """Confident outputs leave 10⁻¹⁸ to learn, far below the rounding of 1: that is not nothing."""
    model, x = mlp(4, 3), torch.ones(1, 4, dtype=torch.float64)
    f0 = torch.tensor([[0.0, 41.0, 0.0]], dtype=torch.float64)
    e = ntkfl.evolve(ntkfl.jacobian(model, x), f0, torch.tensor([1]), lr=1.0, steps=[10.0])
    assert e.residuals[0, 0, 0] == pytest.approx(-10 * math.exp(-41), rel=1e-3)


class TestLinearModel:
    """A model linear in its weights is its own linearisation, so the flow is gradient flow on the true loss."""

    @pytest.mark.parametrize("loss", ["ce", "mse"])
    @pytest.mark.parametrize("kernel", ["full", "trace"])  # equal output blocks: trace is exact too
    def test_flow_is_gradient_flow_on_the_true_loss(self, loss: str, kernel: str) -> None:
        model, x = mlp(4, 3), torch.randn(7, 4).double()
        y, w0, lr, t = torch.tensor([0, 1, 2, 2, 1, 0, 1]), flatten(model), 0.5, 20.0
        Y = targets(y, 3, loss, torch.float64)

        def velocity(w: Tensor) -> Tensor:
            w = w.detach().requires_grad_()
            (g,) = torch.autograd.grad(per_sample(loss, with_values(model, unflatten(model, w))(x), Y).mean(), w)
            return -lr * g

        w = classical(velocity, w0, t, 400)
        e = ntkfl.evolve(ntkfl.jacobian(model, x), model(x).detach(), y, lr=lr, steps=[t], loss=loss, kernel=kernel)
        assert (w0 + e.delta(0) - w).norm() < 1e-3 * (w - w0).norm()
        assert (e.outputs[0] - with_values(model, unflatten(model, w))(x)).norm() < 1e-3 * (
            e.outputs[0] - model(x)
        ).norm()


def test_float32_agrees_with_float64_on_a_stiff_problem() -> None:
    torch.manual_seed(3)
    model, x, y = mlp(20, 50, 10, activation=nn.ReLU), 30 * torch.randn(40, 20).double(), torch.arange(40) % 10
    f0 = model(x).detach()
    exact = ntkfl.evolve(ntkfl.jacobian(model, x), f0, y, steps=[4000], rtol=1e-7)
    single = ntkfl.evolve(ntkfl.jacobian(model.float(), x.float()), f0.float(), y, steps=[4000])
    assert (single.delta(0).double() - exact.delta(0)).norm() < 2e-3 * exact.delta(0).norm()


def test_cost_grows_with_the_square_root_of_the_stiffness() -> None:
    """Scaling J by √c scales the kernel by c: explicit descent would need c times the steps."""
    counts = []
    for scale in (1.0, 100.0, 10_000.0):
        model, x = mlp(4, 3), scale**0.5 * torch.randn(30, 4, generator=torch.Generator().manual_seed(5)).double()
        y = torch.arange(30) % 3
        e = ntkfl.evolve(ntkfl.jacobian(model, x), torch.zeros(30, 3), y, lr=1.0, steps=[50.0])
        counts.append(e.statistics.evaluations)
    assert counts[1] < 12 * counts[0]
    assert counts[2] < 12 * counts[1]


def test_a_step_on_mse_is_half_of_one_on_pytorchs() -> None:
    """`mse` halves the squared error. A linear layer is its own linearisation, so SGD is the oracle: the paper's sum
    begins with one step, and the flow is the limit of many small ones.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x, Y = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    before, J, f0 = flatten(model), ntkfl.jacobian(model, x), model(x).detach()
    one = ntkfl.evolve(J, f0, Y, 0.2, [1], loss="mse", kernel="trace", scheme="paper")
    flow = ntkfl.evolve(J, f0, Y, 0.2, [5], loss="mse", rtol=1e-6)
    for steps, lr, e, bound in ((1, 0.2, one, 1e-14), (500, 0.002, flow, 1e-3)):
        load_flat(model, before)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr / 2)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), Y).backward()
            optimizer.step()
        assert (before + e.delta(0) - flatten(model)).abs().max() < bound
    assert (flow.outputs[0] - model(x)).abs().max() < 5e-3
