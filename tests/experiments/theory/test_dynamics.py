"""Training the network of the analysis, against plain autograd."""

from __future__ import annotations

import pytest
import torch
from ntkfl_experiments.theory.bounds import reach
from ntkfl_experiments.theory.dynamics import (
    descend,
    descended,
    evolved,
    federated_round,
    flip_nearest,
    flipped,
    furthest_move,
    squared_residual,
    within_reach,
)
from ntkfl_experiments.theory.two_layer import TwoLayer, draw, unit


def problem(samples: int = 6, size: int = 5, width: int = 40) -> tuple[TwoLayer, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = unit(torch.randn(samples, size, generator=generator, dtype=torch.float64))
    y = torch.randn(samples, generator=generator, dtype=torch.float64)
    return draw(width, size, seed=2), x, y


def test_descent_is_gradient_descent_on_half_the_mean_square() -> None:
    network, x, y = problem()
    v = network.v.clone().requires_grad_()
    for state in descend(network, x, y, 0.7, 20):
        torch.testing.assert_close(state.network.v, v.detach())
        torch.testing.assert_close(state.residual, y - TwoLayer(v.detach(), network.c).outputs(x))
        loss = 0.5 * (TwoLayer(v, network.c).outputs(x) - y).square().mean()
        (slope,) = torch.autograd.grad(loss, v)
        v = (v - 0.7 * slope).detach().requires_grad_()
    assert state.step == 20
    torch.testing.assert_close(descended(network, x, y, 0.7, 20).v, state.network.v)


@pytest.mark.parametrize("lr", [0.01, 3.0])
def test_evolution_is_the_papers_two_formulas(lr: float) -> None:
    network, x, y = problem()
    H, f0 = network.kernel(x), network.outputs(x)
    steps = [1, 7, 50]

    def f(t: float) -> torch.Tensor:  # the function evolution, d2 = 1
        return y + torch.matrix_exp(-lr * t / len(x) * H) @ (f0 - y)

    found = evolved(network, x, y, lr, steps)
    for i, t in enumerate(steps):
        torch.testing.assert_close(found.residuals[i], y - f(t))
        summed = sum((y - f(u) for u in range(t)), torch.zeros_like(y))
        torch.testing.assert_close(found.networks[i].v, network.v + lr / len(x) * network.pull_back(x, summed))


def test_one_local_step_of_equal_clients_is_the_central_step() -> None:
    network, x, y = problem()
    shares = list(torch.tensor([4, 1, 0, 5, 2, 3]).view(3, 2))
    torch.testing.assert_close(
        federated_round(network, x, y, shares, 0.5, 1).v, descended(network, x, y, 0.5, 1).v, rtol=0, atol=1e-14
    )
    more = federated_round(network, x, y, shares, 0.5, 5).v - descended(network, x, y, 0.5, 5).v
    assert float(more.abs().max()) > 1e-4


def test_dividing_twice_is_a_step_smaller_by_the_number_of_clients() -> None:
    network, x, y = problem()
    shares = list(torch.arange(6).view(3, 2))
    twice = federated_round(network, x, y, shares, 0.6, 4, divide_twice=True)
    torch.testing.assert_close(twice.v, federated_round(network, x, y, shares, 0.2, 4).v)


def test_moves_flips_and_reach() -> None:
    network, x, y = problem()
    after = descended(network, x, y, 2.0, 30)
    radius = furthest_move(after, network)
    assert bool((flipped(after, network, x) <= within_reach(network, x, radius)).all())
    assert int(flipped(after, network, x).sum()) > 0
    sums = [float(s.residual.abs().mean()) for s in descend(network, x, y, 2.0, 29)]
    assert radius <= reach(network.width, 2.0, sums)
    assert squared_residual(after, x, y) < squared_residual(network, x, y)


def test_the_adversary_flips_what_is_in_reach_and_moves_no_further() -> None:
    network, x, _ = problem(width=200)
    radius = 0.05
    after = flip_nearest(network, x, radius)
    assert 0 < furthest_move(after, network) <= radius
    reachable = ((x @ network.v.T).abs() * (1 + 1e-9) <= radius).any(dim=0)
    changed = (after.active(x) != network.active(x)).any(dim=0)
    assert bool((changed == reachable).all())
    assert 0 < int(changed.sum()) < 200
