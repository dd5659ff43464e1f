"""The evolution against explicit oracles: closed forms, brute-force sums, tight integration, plain gradient descent."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ntkfl
from ntkfl.errors import ConfigError, DataError, NumericalError
from ntkfl.tangent.losses import per_sample, residual, targets
from ntkfl.tangent.parameters import apply_flat, flatten
from tests.tangent.networks import build, mlp

STEPS = (0.5, 3, 10, 40.25)


def problem(name: str = "relu", outputs: int = 3) -> tuple[nn.Module, Tensor, ntkfl.Jacobian, Tensor, Tensor]:
    model, x = build(name)
    y = torch.tensor([0, 1, 2, 2, 1, 0, 1]) % outputs
    with torch.no_grad():
        f0 = model(x)
    return model, x, ntkfl.jacobian(model, x), f0, y


def theta(J: ntkfl.Jacobian, kernel: str) -> Tensor:
    """The dense kernel over all N·d2 outputs."""
    N, d2, d = J.shape
    D = J.dense()
    if kernel == "full":
        flat = D.reshape(N * d2, d)
        return flat @ flat.T
    return torch.kron(torch.einsum("ajd,bjd->ab", D, D) / d2, torch.eye(d2, dtype=D.dtype))


def rk4(J: ntkfl.Jacobian, f0: Tensor, Y: Tensor, lr: float, t: float, loss: str, kernel: str) -> tuple[Tensor, Tensor]:
    """Tight integration of f' = (η/N) Θ r and R' = r by the classical fourth-order method on the dense kernel."""
    Theta, N = theta(J, kernel), len(f0)
    n = max(200, math.ceil(20 * t * lr / N * float(torch.linalg.matrix_norm(Theta, 2))))
    h = t / n
    R = torch.zeros_like(f0)

    def slope(R: Tensor) -> Tensor:
        return residual(loss, f0 + lr / N * (Theta @ R.reshape(-1)).view_as(f0), Y)

    for _ in range(n):
        a = slope(R)
        b = slope(R + h / 2 * a)
        c = slope(R + h / 2 * b)
        R = R + h / 6 * (a + 2 * b + 2 * c + slope(R + h * c))
    return f0 + lr / N * (Theta @ R.reshape(-1)).view_as(f0), R


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
def test_descent_equals_explicit_gradient_descent(loss: str, kernel: str) -> None:
    _, _, J, f0, y = problem()
    Y, lr, N = targets(y, 3, loss, torch.float64), 0.3, len(f0)
    Theta = theta(J, kernel)
    f, R, at = f0, torch.zeros_like(f0), {}
    for t in range(1, 31):
        R = R + residual(loss, f, Y)
        f = f0 + lr / N * (Theta @ R.reshape(-1)).view_as(f0)
        at[t] = (f, R)
    e = ntkfl.evolve(J, f0, y, lr=lr, steps=[1, 7, 30], loss=loss, kernel=kernel, scheme="descent")
    for i, t in enumerate([1, 7, 30]):
        assert (e.outputs[i] - at[t][0]).abs().max() < 1e-12
        assert (e.residuals[i] - at[t][1]).abs().max() < 1e-12


def test_descent_on_the_full_kernel_is_descent_on_the_linearised_network() -> None:
    """w(t+1) = w(t) − η ∇L of f0 + J (w − w0), by autograd on the weights, without any kernel."""
    _, _, J, f0, y = problem()
    D, lr = J.dense(), 0.3
    w = torch.zeros(J.shape[2], dtype=torch.float64)
    for _ in range(12):
        w.requires_grad_()
        L = nn.functional.cross_entropy(f0 + D @ w, y)
        (g,) = torch.autograd.grad(L, w)
        w = (w - lr * g).detach()
    e = ntkfl.evolve(J, f0, y, lr=lr, steps=[12], scheme="descent")
    assert (e.delta(0) - w).abs().max() < 1e-12
    assert (e.outputs[0] - (f0 + D @ w)).abs().max() < 1e-12


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

    def test_exceeds_the_flow_by_the_known_factor_in_each_direction(self) -> None:
        _, _, J, f0, y = problem()
        lr, N, d2 = 20.0, 7, 3
        values, Q = torch.linalg.eigh(J.kernel())
        kwargs = {"lr": lr, "steps": [4], "loss": "mse", "kernel": "trace"}
        flow = Q.T @ ntkfl.evolve(J, f0, y, **kwargs).residuals[0]  # type: ignore[arg-type]
        paper = Q.T @ ntkfl.evolve(J, f0, y, scheme="paper", **kwargs).residuals[0]  # type: ignore[arg-type]
        decay = lr * values / (N * d2)
        ratio = decay / -torch.expm1(-decay)
        assert ratio.max() > 1.2
        assert (paper - ratio.unsqueeze(1) * flow).abs().max() < 1e-9

    def test_schemes_meet_for_small_learning_rates(self) -> None:
        _, _, J, f0, y = problem()
        results = [
            ntkfl.evolve(J, f0, y, lr=1e-4, steps=[300], loss="mse", kernel="trace", scheme=scheme).delta(0)
            for scheme in ("flow", "descent", "paper")
        ]
        assert (results[0] - results[1]).norm() < 1e-4 * results[0].norm()
        assert (results[0] - results[2]).norm() < 1e-4 * results[0].norm()

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

    @pytest.mark.parametrize("loss", ["ce", "mse"])
    def test_the_full_kernel_is_refused(self, loss: str) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(ConfigError, match="kernel 'trace'"):
            ntkfl.evolve(J, f0, y, steps=[5], loss=loss, kernel="full", scheme="paper")


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
    exact = [
        ntkfl.evolve(J[o], f0[o], y[o], lr=0.1, steps=[20], loss=loss, kernel=kernel, scheme="descent").delta(0)
        for o in (torch.arange(7), order)
    ]
    assert (exact[0] - exact[1]).abs().max() < 1e-13


@pytest.mark.parametrize("loss", ["ce", "mse"])
@pytest.mark.parametrize("kernel", ["full", "trace"])
def test_nothing_happens_in_no_time(loss: str, kernel: str) -> None:
    _, _, J, f0, y = problem()
    e = ntkfl.evolve(J, f0, y, lr=1.0, steps=[1e-9], loss=loss, kernel=kernel)
    assert (e.outputs[0] - f0).abs().max() < 1e-7
    assert e.delta(0).abs().max() < 1e-7


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


def test_mse_interpolates_in_the_end() -> None:
    model, x = mlp(4, 60, 3), torch.randn(5, 4).double()
    J, y = ntkfl.jacobian(model, x), torch.randn(5, 3).double()
    f0 = model(x).detach()
    assert torch.linalg.eigvalsh(theta(J, "full")).min() > 1e-3
    e = ntkfl.evolve(J, f0, y, lr=1.0, steps=[1e5], loss="mse", kernel="full")
    assert (e.outputs[0] - y).abs().max() < 1e-3
    assert (f0 + J.jvp(e.delta(0)) - y).abs().max() < 1e-3


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
            (g,) = torch.autograd.grad(per_sample(loss, apply_flat(model, w, x), Y).mean(), w)
            return -lr * g

        w, n = w0, 400
        for _ in range(n):
            h = t / n
            a = velocity(w)
            b = velocity(w + h / 2 * a)
            c = velocity(w + h / 2 * b)
            w = w + h / 6 * (a + 2 * b + 2 * c + velocity(w + h * c))
        e = ntkfl.evolve(ntkfl.jacobian(model, x), model(x).detach(), y, lr=lr, steps=[t], loss=loss, kernel=kernel)
        assert (w0 + e.delta(0) - w).norm() < 1e-3 * (w - w0).norm()
        assert (e.outputs[0] - apply_flat(model, w, x)).norm() < 1e-3 * (e.outputs[0] - model(x)).norm()


@pytest.mark.parametrize("loss", ["mse"])
def test_trace_equals_full_for_one_output(loss: str) -> None:
    _, _, J, f0, _ = problem("scalar output")
    y = torch.randn(7, 1).double()
    full, trace = (
        ntkfl.evolve(J, f0, y, lr=1.0, steps=STEPS, loss=loss, kernel=k, rtol=1e-6) for k in ("full", "trace")
    )
    assert (full.residuals - trace.residuals).norm() < 1e-5 * trace.residuals.norm()


@given(st.floats(1e-3, 10), st.floats(1e-3, 10))
@settings(max_examples=15, deadline=None)
def test_flow_depends_on_the_flow_time_alone(lr: float, time: float) -> None:
    _, _, J, f0, y = problem()
    one = ntkfl.evolve(J, f0, y, lr=lr, steps=[time / lr])
    other = ntkfl.evolve(J, f0, y, lr=1.0, steps=[time])
    assert (one.delta(0) - other.delta(0)).norm() < 2e-3 * other.delta(0).norm()


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


class TestGrid:
    def test_geometric_grid(self) -> None:
        steps = ntkfl.geometric_steps(0.01)
        assert steps[-1] == pytest.approx(4000)
        assert all(b / a == pytest.approx(1.5) for a, b in itertools.pairwise(steps))
        assert 0.1 <= steps[0] * 0.01 < 0.15

    def test_default_steps_are_the_geometric_grid(self) -> None:
        _, _, J, f0, y = problem()
        assert ntkfl.evolve(J, f0, y, lr=0.02).steps == ntkfl.geometric_steps(0.02)


class TestRefusals:
    @pytest.mark.parametrize("steps", [[], [0], [-1, 2], [3, 3], [2, 1], [1, float("inf")], [float("nan")]])
    def test_bad_steps(self, steps: list[float]) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(ConfigError, match="increasing list of positive numbers"):
            ntkfl.evolve(J, f0, y, steps=steps)

    def test_steps_that_are_no_list(self) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(ConfigError, match="not 10"):
            ntkfl.evolve(J, f0, y, steps=10)  # type: ignore[arg-type]

    @pytest.mark.parametrize("scheme", ["descent", "paper"])
    def test_fractional_steps_need_the_flow(self, scheme: str) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(ConfigError, match="whole numbers of steps"):
            ntkfl.evolve(J, f0, y, steps=[1.5], loss="mse", kernel="trace", scheme=scheme)

    @pytest.mark.parametrize(("key", "value"), [("loss", "hinge"), ("kernel", "ful"), ("scheme", "euler")])
    def test_unknown_names(self, key: str, value: str) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(ConfigError, match=f"unknown {key} '{value}'"):
            ntkfl.evolve(J, f0, y, **{key: value})  # type: ignore[arg-type]

    @pytest.mark.parametrize("lr", [0.0, -1.0, float("nan"), float("inf")])
    def test_learning_rate(self, lr: float) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(ConfigError):
            ntkfl.evolve(J, f0, y, lr=lr, steps=[1])

    @pytest.mark.parametrize("rtol", [-1e-3, 0.0, 1e-12, 1.0, float("nan"), float("inf")])
    @pytest.mark.parametrize("scheme", ["flow", "descent"])
    def test_relative_tolerance(self, rtol: float, scheme: str) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(ConfigError, match=r"rtol must be at least 1e-09 and below 1, got .*takes more steps"):
            ntkfl.evolve(J, f0, y, steps=[1], rtol=rtol, scheme=scheme)

    def test_the_smallest_tolerance_is_possible(self) -> None:
        _, _, J, f0, y = problem()
        ntkfl.evolve(J, f0, y, lr=1.0, steps=[5], rtol=1e-9)

    @pytest.mark.parametrize("loss", ["ce", "mse"])
    @pytest.mark.parametrize("kernel", ["full", "trace"])
    def test_no_rows(self, loss: str, kernel: str) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(DataError, match="the Jacobian has no rows"):
            ntkfl.evolve(J[[]], f0[:0], y[:0], steps=[1], loss=loss, kernel=kernel)

    @pytest.mark.parametrize("y", [torch.zeros(7, dtype=torch.int64), torch.ones(7, 1)])
    def test_cross_entropy_of_one_output(self, y: Tensor) -> None:
        _, _, J, f0, _ = problem("scalar output")
        with pytest.raises(DataError, match="two outputs, or use loss 'mse'"):
            ntkfl.evolve(J, f0, y, steps=[1], loss="ce")

    def test_a_cost_without_end_does_not_blame_the_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ntkfl.tangent.solvers.MOST_PRODUCTS", 10)
        _, _, J, f0, y = problem()
        with pytest.raises(NumericalError, match="take shorter steps or a larger rtol"):
            ntkfl.evolve(J, f0, y, lr=1.0, steps=[1e6])

    @pytest.mark.parametrize("loss", ["ce", "mse"])
    def test_divergence_is_reported_in_words(self, loss: str) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(NumericalError, match=r"diverged: after \d+ steps of size 1000 the loss is"):
            ntkfl.evolve(J, f0, y, lr=1e3, steps=[1, 2, 5, 50], loss=loss, scheme="descent")

    def test_values_that_are_not_finite(self) -> None:
        _, _, J, f0, y = problem()
        f0[3, 1] = float("inf")
        with pytest.raises(NumericalError, match="f0 has values that are not finite"):
            ntkfl.evolve(J, f0, y)

    def test_labels(self) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(DataError, match="labels run from 0 to 3"):
            ntkfl.evolve(J, f0, y + (y == 2).long())
        with pytest.raises(DataError, match="6 labels for 7 samples"):
            ntkfl.evolve(J, f0, y[:6])
        with pytest.raises(DataError, match="must be probabilities"):
            ntkfl.evolve(J, f0, torch.randn(7, 3))
        with pytest.raises(DataError, match=r"must have shape \[N, 3\]"):
            ntkfl.evolve(J, f0, torch.randn(7, 2), loss="mse")
        with pytest.raises(DataError, match="f0 must have the Jacobian's shape"):
            ntkfl.evolve(J, f0[:, :2], y)
