"""What docs/paper.md says of the paper, as far as it is pure mathematics: each statement shown by numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ntkfl_experiments.theory.bounds import FLIP, flips, kernel_drift, weight_gap, weight_gap_certain
from ntkfl_experiments.theory.decay import descent_factor, flow_factor, requirements
from ntkfl_experiments.theory.dynamics import descended, federated_round, flip_nearest, furthest_move, within_reach
from ntkfl_experiments.theory.two_layer import draw, limit_kernel, smallest_eigenvalue, spectral_norm, unit
from torch import nn

import ntkfl
from ntkfl.errors import ConfigError

DOUBLE = torch.float64


def linear_problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A model linear in its weights, three outputs: the trace kernel is exact, so nothing else is approximated."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8, generator=generator, dtype=DOUBLE)
    y = torch.randn(5, 3, generator=generator, dtype=DOUBLE)
    model = nn.Linear(8, 3, bias=False).double()
    with torch.no_grad():
        model.weight.normal_(generator=generator)
    return model, x, y, ntkfl.jacobian(model, x).kernel()


def test_outputs_decay_by_the_number_of_outputs_more_slowly_than_printed() -> None:
    model, x, y, H = linear_problem()
    f0, W = model(x).detach(), model.weight.detach().clone().requires_grad_()
    lr, steps = 0.01, 600
    for _ in range(steps):  # gradient descent on the paper's own loss, the halved mean square over samples and outputs
        (slope,) = torch.autograd.grad(0.5 * (x @ W.T - y).square().mean(), W)
        W = (W - lr * slope).detach().requires_grad_()

    def evolution(divisor: float) -> torch.Tensor:
        return y + torch.matrix_exp(-lr * steps / divisor * H) @ (f0 - y)

    found = (x @ W.T).detach()
    assert float((evolution(5 * 3) - found).norm() / (f0 - y).norm()) < 5e-3
    assert float((evolution(5) - found).norm() / (f0 - y).norm()) > 0.1  # as printed


def test_the_printed_pair_of_evolutions_goes_a_tenth_of_the_way_to_the_labels() -> None:
    """Outputs that decay d2 times too fast leave residuals too small: J Δw ends at (Y − f0)/d2 · a/(1 − e^−a)."""
    generator = torch.Generator().manual_seed(0)
    x, Y, f0 = (torch.randn(6, n, generator=generator, dtype=DOUBLE) for n in (12, 10, 10))
    values, Q = torch.linalg.eigh(x @ x.T)  # one linear layer, ten outputs: the kernel of each

    def way(lr: float, steps: int) -> torch.Tensor:
        """The part of the way from f0 to Y per eigenvector: η/(N d2) λ Σ_{u<t} e^{−ηλu/N}, both as printed."""
        a = lr * values / 6
        return a / 10 * torch.expm1(-a * steps) / torch.expm1(-a)

    assert float((way(1e-3, 10_000_000) - 0.1).abs().max()) < 1e-3
    a = 1e-2 * values / 6
    torch.testing.assert_close(way(1e-2, 1_000_000), 0.1 * a / -torch.expm1(-a))
    # A learning rate at which one direction arrives, a = 9.9995, leaves all smaller eigenvalues short of it.
    lr = 9.9995 * 6 / float(values[-1])
    assert float(way(lr, 1000)[-1]) == pytest.approx(1, abs=1e-3)
    assert float(way(lr, 1000)[0]) < 0.5
    # By hand on the weights: the same sum of the printed residuals, through the Jacobian of the layer.
    R = Q @ ((-torch.expm1(-a * 500) / -torch.expm1(-a)).unsqueeze(1) * (Q.T @ (Y - f0))) * (1e-2 / (6 * 10))
    torch.testing.assert_close(Q.T @ (x @ (x.T @ R)), way(1e-2, 500).unsqueeze(1) * (Q.T @ (Y - f0)))


def test_the_printed_solution_does_not_solve_the_printed_equation() -> None:
    model, x, y, H = linear_problem()
    f0, lr, t, h = model(x).detach(), 0.1, 3.0, 1e-5

    def solution(time: float) -> torch.Tensor:
        return y + torch.matrix_exp(-lr * time / len(x) * H) @ (f0 - y)

    slope = (solution(t + h) - solution(t - h)) / (2 * h)
    printed = -lr * H @ (solution(t) - y)
    torch.testing.assert_close(slope, printed / len(x), rtol=1e-6, atol=1e-9)
    assert float((slope - printed).norm()) > float(slope.norm())


def test_the_papers_weights_miss_the_labels_its_outputs_reach() -> None:
    model, x, y, H = linear_problem()
    lr, f0 = 20.0, model(x).detach()
    e = ntkfl.evolve(ntkfl.jacobian(model, x), f0, y, lr, [100_000], "mse", "trace", "paper")
    torch.testing.assert_close(e.outputs[0], y, atol=1e-9, rtol=0)  # the function evolution
    with torch.no_grad():
        model.weight += e.delta(0).view_as(model.weight)
    values, Q = torch.linalg.eigh(H)
    a = lr * values / (5 * 3)
    missed = Q.T @ (model(x).detach() - y)
    start = Q.T @ (y - f0)
    torch.testing.assert_close(missed, (a / -torch.expm1(-a) - 1).unsqueeze(1) * start)
    assert float(missed.norm()) > 0.5 * float(start.norm())


def test_one_local_step_of_unequal_clients_is_not_the_central_step() -> None:
    """Of equal ones it is (test_dynamics.py), so Theorem 2 has no clients in it; here F weighs clients, not samples."""
    x, y, network = torch.eye(8, dtype=DOUBLE), torch.ones(8, dtype=DOUBLE), draw(300, 8, seed=0)
    unequal = [torch.arange(6), torch.tensor([6]), torch.tensor([7])]
    apart = federated_round(network, x, y, unequal, 0.5, 1).v - descended(network, x, y, 0.5, 1).v
    assert float(apart.abs().max()) > 1e-3


@given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=6), min_size=1, max_size=6))
def test_the_step_by_norms_is_false_as_printed_and_holds_by_another_way(clients: list[list[float]]) -> None:
    """Σ_m Σ_j |a_mj| ≤ Σ_m √N_m ‖a_m‖₂ ≤ √N ‖a‖₂; the printed Σ_m N_m ‖a_m‖₁ ≤ √N ‖a‖₂ loses a factor N_m, and cites
    ‖a‖₁ ≤ ‖a‖₂, which is the wrong way round.
    """
    root = math.sqrt(sum(map(len, clients)))
    norm = math.sqrt(sum(v * v for a in clients for v in a))
    between = sum(math.sqrt(len(a)) * math.hypot(*a) for a in clients)
    assert sum(abs(v) for a in clients for v in a) <= between * (1 + 1e-12) + 1e-100
    assert between <= root * norm * (1 + 1e-12) + 1e-100
    ones = [[1.0, 1.0], [1.0, 1.0]]
    assert sum(len(a) * sum(a) for a in ones) > math.sqrt(4) * math.hypot(*ones[0], *ones[1])


def test_lemma_1_is_for_one_input_and_not_for_all() -> None:
    delta, width, samples, draws = 0.1, 32, 40, 200
    radius = 0.99 * delta / (FLIP * width)
    bound = flips(width, radius, 1.0, delta)
    assert bound < 1
    x = torch.eye(samples, dtype=DOUBLE)
    sizes = torch.stack([within_reach(draw(width, samples, seed), x, radius) for seed in range(draws)])  # [draws, N]
    broken = sizes > bound
    each = broken.double().mean(dim=0)
    assert float(each.mean()) <= delta  # for each i, as Markov says
    assert float(broken.any(dim=1).double().mean()) > 0.9  # 1 − (1 − 0.096)^40 = 0.98 for some i


def test_lemma_2_as_printed_is_above_what_is_certain() -> None:
    for alpha, delta in ((1.0, 0.1), (0.05, 0.1), (1.0, 0.79)):
        assert weight_gap(100, 784, 0.1, alpha, delta, [1.0]) > weight_gap_certain(100, 784, 0.1, [1.0])
    assert weight_gap(100, 784, 0.1, 1.0, 0.81, [1.0]) < weight_gap_certain(100, 784, 0.1, [1.0])


def test_lemma_3_fails_for_inputs_alike_and_a_small_radius() -> None:
    delta, samples, width, draws = 0.1, 400, 4, 150
    radius = 0.7 * math.sqrt(samples / 8) / width * delta / (2 * FLIP * samples)
    bound = kernel_drift(samples, radius, 1.0, delta)
    x = torch.cat([torch.ones(samples, 1, dtype=DOUBLE), torch.eye(samples, dtype=DOUBLE)], dim=1) / math.sqrt(2)
    broken = 0
    for seed in range(draws):
        network = draw(width, samples + 1, seed)
        after = flip_nearest(network, x, radius)
        if furthest_move(after, network) > 0:
            assert furthest_move(after, network) <= radius
            broken += spectral_norm(after.kernel(x) - network.kernel(x)) > bound
    # δ = 0.1 would allow 15 of 150, and 27 or more with probability 0.002.
    assert broken >= 27


def test_lemma_4_needs_the_range_1() -> None:
    # A summand x_i·x_j 1_i 1_j lies in [0, x_i·x_j]: a range of 1, for which Hoeffding gives the printed √(ln(2/δ)/2n).
    x = unit(torch.randn(20, 6, dtype=DOUBLE))
    summands = (x @ x.T).unsqueeze(-1) * draw(500, 6, 0).active(x).unsqueeze(0) * draw(500, 6, 0).active(x).unsqueeze(1)
    ranges = summands.amax(dim=-1) - summands.amin(dim=-1)
    assert float(ranges.max()) <= 1 + 1e-12
    assert float(summands.min()) < 0 < float(summands.max())  # over all entries they do fill more than [0, 1]


def test_the_width_of_theorem_1_does_not_keep_weights_where_its_proof_needs_them() -> None:
    x = unit(torch.randn(4, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(1)))
    y = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=DOUBLE)
    smallest = smallest_eigenvalue(limit_kernel(x))
    asked = requirements(4, smallest, 1.0, 0.1)
    network = draw(math.ceil(asked.width), 6, seed=0)
    after = descended(network, x, y, asked.lr, 200)
    assert furthest_move(after, network) > 2 * asked.radius
    assert asked.width_to_stay > 1e4 * asked.width


def test_theorem_1_for_the_function_evolution_has_a_condition_on_the_learning_rate() -> None:
    """e^{−4sρ} ≤ 1 − s, with s = ηλ/2N and ρ = λ_min(H)/λ, asks for ρ ≥ −ln(1 − s)/4s: 1/4 for small s, more later."""
    samples, limit = 10, 0.5
    for s, least in ((1e-4, 0.25), (0.5, 0.347), (0.99, 1.163)):
        lr = 2 * samples * s / limit
        assert -math.log(1 - s) / (4 * s) == pytest.approx(least, abs=1e-3)
        for times, inside in ((1.01, True), (0.99, False)):
            smallest = times * limit * -math.log(1 - s) / (4 * s)
            bound = descent_factor(lr, limit, samples, 7)
            assert (flow_factor(lr, smallest, samples, 7) <= bound) is inside
    with pytest.raises(ConfigError, match="ηλ < 2N"):
        descent_factor(2 * samples / limit, limit, samples, 1)


@pytest.mark.parametrize("samples", [2, 10, 1000, 100_000])
@pytest.mark.parametrize("smallest", [0.5, 0.01, 1e-6])
def test_theorem_1_never_enters_the_corner_where_lemmas_1_and_3_fail(samples: int, smallest: float) -> None:
    """λ is at most 1/2, the diagonal of H_∞. At the width and radius asked for, δ = 0.1."""
    delta = 0.1
    asked = requirements(samples, smallest, 1.0, delta)
    bound = flips(math.ceil(asked.width), asked.radius, 1.0, delta)
    assert bound > 8  # neurons: Lemma 1 fails where it is below one
    mean = delta * bound  # of a binomial, at most; Chernoff: P(|S_i| > mean/δ) ≤ e^{−mean (ln(1/δ)/δ − 1/δ + 1)}
    log_all = math.log(samples) - mean * (math.log(1 / delta) / delta - 1 / delta + 1)
    assert log_all < math.log(delta)  # so it holds for all i
    p = 2 * FLIP * asked.radius
    assert asked.width * p >= delta / (1 - delta)  # the printed Lemma 3 is then above the second moment's bound


def test_figure_9s_coefficient_goes_with_the_learning_rate() -> None:
    for lr, coefficient in ((0.1, 223), (1e-3, 2.23)):
        assert weight_gap(100, 784, lr, 1.0, 0.1, [1.0]) == pytest.approx(coefficient, rel=2e-3)


def test_table_1s_megabytes_are_not_of_the_sparsity_named() -> None:
    """26 rounds × 20 clients × 60 rows of 10 × 21,110 float32 numbers, values alone."""
    dense = 26 * 20 * (200 * 0.3) * 10 * (200 * 100 + 100 + 100 * 10 + 10) * 4 / 2**20
    assert 0.1 * dense == pytest.approx(2512, abs=1)  # FedAvg's 1,720 is less
    assert 1 - 386 / dense == pytest.approx(0.985, abs=5e-4)


def test_the_trace_kernel_is_not_exact_where_outputs_share_weights() -> None:
    """f = (w·x, 2 w·x) is linear in w, and H ⊗ I is not its kernel; two rows of weights of their own are."""
    x = torch.randn(4, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    J = torch.stack([x, 2 * x], dim=1)  # [N, d2, d]
    own = torch.zeros(4, 2, 6, dtype=DOUBLE)
    own[:, 0, :3], own[:, 1, 3:] = x, x

    def differ(J: torch.Tensor) -> float:
        full = J.reshape(8, -1) @ J.reshape(8, -1).T
        trace = torch.kron(torch.einsum("ijd,kjd->ik", J, J) / 2, torch.eye(2, dtype=DOUBLE))
        return float((full - trace).norm() / full.norm())

    assert differ(own) < 1e-14
    assert differ(J) > 0.5
