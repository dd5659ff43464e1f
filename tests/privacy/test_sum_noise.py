"""Noise on sums: its (ε, δ) against the closed form, dp-accounting and the mechanism's own privacy loss; its width."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ntkfl.errors import ConfigError
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.sum_noise import (
    COUNT,
    GRAINS,
    ORDERS,
    SumBudget,
    budget,
    concentrated,
    divergences,
    guarantee,
    integer_change,
    spent,
    to_integers,
)


def renyi(change: int, sigma: float, clients: int, alpha: float) -> float:
    """D_α of the sum of discrete Gaussians against itself moved by `change`, by summing it out."""
    k = np.arange(-round(15 * sigma), round(15 * sigma) + 1)
    one = np.exp(-0.5 * (k / sigma) ** 2)
    one /= one.sum()
    total = one
    for _ in range(clients - 1):
        total = np.convolve(total, one)
    logs = np.log(total)
    loss = alpha * logs[change:] + (1 - alpha) * logs[:-change]
    return float(np.log(np.exp(loss).sum()) / (alpha - 1))


@pytest.mark.parametrize("sigma", [1.0, 3.0])
@pytest.mark.parametrize("alpha", [1.5, 2.0, 4.0])
def test_the_mechanism_is_as_concentrated_as_the_closed_form_says(sigma: float, alpha: float) -> None:
    """One client: D_α = ρα exactly for whole changes. Several: at most ρα, and near it."""
    change = 2
    assert renyi(change, sigma, 1, alpha) == pytest.approx(alpha * change**2 / (2 * sigma**2), rel=1e-6)
    rho = concentrated(change, sigma, 3, 1)
    found = renyi(change, sigma, 3, alpha)
    assert found <= alpha * rho * (1 + 1e-9)
    assert found == pytest.approx(alpha * change**2 / (6 * sigma**2), rel=1e-3)


def test_noise_of_many_clients_is_one_clients_and_narrow_noise_pays() -> None:
    assert concentrated(5.0, 100.0, 1, 1000) == pytest.approx(25 / 2e4)
    assert concentrated(5.0, 10.0, 100, 1000) == pytest.approx(25 / 2e4)
    assert concentrated(5.0, 0.5, 100, 1000) > 1.01 * 25 / 50


def test_a_budget_is_used_up_and_not_exceeded() -> None:
    for epsilon, delta in ((0.3, 1e-5), (1.0, 1e-5), (3.0, 1e-6), (20.0, 1e-3)):
        rho = budget(epsilon, delta)
        assert epsilon * (1 - 1e-6) < spent([(rho, 1)], delta) <= epsilon
        assert spent([(1.01 * rho, 1)], delta) > epsilon
        # never better than the Gaussian mechanism with this ρ, of which δ is known exactly, and not much worse
        exact = gaussian_delta(epsilon, 1 / math.sqrt(2 * rho))
        assert exact < delta < 30 * exact
    assert spent([(0.0, 1)], 1e-5) == 0
    for epsilon, delta in ((0.0, 1e-5), (1.0, 0.0), (1.0, 1.0)):
        with pytest.raises(ConfigError):
            budget(epsilon, delta)


def gaussian_delta(epsilon: float, sigma: float) -> float:
    """Balle & Wang 2018, theorem 8, at sensitivity 1."""

    def below(t: float) -> float:
        return 0.5 * math.erfc(-t / math.sqrt(2))

    return below(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * below(-0.5 / sigma - epsilon * sigma)


def test_a_guarantee_is_the_budget_with_what_it_assumes() -> None:
    rho = budget(3.0, 1e-5)
    found = guarantee([(0.1 * rho, 1), (0.9 * rho / 20, 20)], 1e-5, clients=270, against="the servers", secure=True)
    assert found["epsilon"] == pytest.approx(3.0, rel=1e-3)
    assert found["epsilon"] <= 3.0 + 1e-9
    assert found["unit"] == "record"
    assert any("270" in line for line in found["assumptions"])
    assert any("collude" in line for line in found["assumptions"])


def mixture_renyi(alpha: float, rate: float, change: int, sigma: float) -> float:
    """D_α of (was the client drawn, a discrete Gaussian moved by `change` if it was) against the same unmoved."""
    inside = math.exp((alpha - 1) * renyi(change, sigma, 1, alpha))
    return math.log((1 - rate) + rate * inside) / (alpha - 1)


@pytest.mark.parametrize("rate", [0.05, 0.5, 1.0])
def test_a_client_that_is_drawn_at_random_spends_the_mean_of_both_cases(rate: float) -> None:
    change, sigma = 2, 3.0
    found = divergences([(change**2 / (2 * sigma**2), 3)], rate)
    for i in (0, 200, 300):
        assert found[i] == pytest.approx(3 * mixture_renyi(ORDERS[i], rate, change, sigma), rel=1e-6)


def test_what_sampling_is_worth() -> None:
    """Less than always being drawn, more than being drawn the expected number of times; and no less than the hockey
    stick of the number of rounds drawn, which is binomial, says exactly for Gaussian noise.
    """
    rate, rounds, rho, delta = 1 / 15, 20, 0.05, 1e-5
    sampled = spent([(rho, rounds)], delta, rate)
    assert spent([(rate * rounds * rho, 1)], delta) < sampled < spent([(rounds * rho, 1)], delta)
    drawn = [math.comb(rounds, k) * rate**k * (1 - rate) ** (rounds - k) for k in range(rounds + 1)]
    exact = math.fsum(p * gaussian_delta(sampled, 1 / math.sqrt(2 * k * rho)) for k, p in enumerate(drawn) if k)
    assert exact < delta < 30 * exact
    assert spent([(rho, rounds)], delta, 1.0) == pytest.approx(spent([(rounds * rho, 1)], delta))


def test_a_budget_of_parts_is_used_up_under_sampling() -> None:
    parts = ((0.19, 1), (0.09, 9))
    for rate in (1.0, 0.1):
        rho = budget(1.0, 1e-5, parts, rate)
        assert spent([(rho * part, times) for part, times in parts], 1e-5, rate) == pytest.approx(1.0, rel=1e-6)
    assert budget(1.0, 1e-5, parts, 0.1) > 2 * budget(1.0, 1e-5, parts)
    assert budget(1.0, 1e-5, parts) == pytest.approx(budget(1.0, 1e-5))


def test_dp_accountings_own_event_agrees() -> None:
    """ρ as the library's own event, composed by its accountant."""
    dp_accounting = pytest.importorskip("dp_accounting")
    rdp = pytest.importorskip("dp_accounting.rdp")
    accountant = rdp.RdpAccountant(orders=ORDERS)
    accountant.compose(dp_accounting.ZCDpEvent(0.01), 7)
    told = guarantee([(0.01, 7)], 1e-5, clients=1, against="all", secure=False)
    assert told["epsilon"] == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)


# How wide the noise is


def test_rounding_moves_two_vectors_apart_by_no_more_than_the_change_says() -> None:
    """The same draws for both, as for a client with a record more or less; and on average nothing moves."""
    generator = torch.Generator().manual_seed(1)
    for numbers in (1, 100, 5000):
        a = torch.randn(numbers, generator=generator, dtype=torch.float64)
        step = torch.randn(numbers, generator=generator, dtype=torch.float64)
        b = a + step / step.norm()
        own = Randomness.simulated(numbers)
        (one,), (other,) = (to_integers([(v, math.inf)], own) for v in (a, b))
        assert float((one - other).double().norm()) <= integer_change([numbers])
        assert float((one - GRAINS * a).abs().max()) <= 1
    many = torch.cat([to_integers([(torch.full((1000,), 0.3 / GRAINS), 5.0)], Randomness.simulated(9))[0]])
    assert float(many.double().mean()) == pytest.approx(0.3, abs=5 * math.sqrt(0.21 / 1000))


def test_numbers_are_cut_at_their_limit() -> None:
    (cut,) = to_integers([(torch.tensor([3.0, -3.0, 0.5]), float(GRAINS))], Randomness.simulated(0))
    assert cut.tolist() == [GRAINS, -GRAINS, GRAINS // 2]


def test_changes() -> None:
    assert integer_change([0]) == pytest.approx(GRAINS * 1.001)
    assert integer_change([400], counted=True) == pytest.approx(math.hypot(GRAINS * 1.001 + 20, COUNT))
    assert integer_change([100, 300]) == pytest.approx(GRAINS * 1.001 * math.sqrt(2) + 20)
    assert integer_change([400], grains=100, rounding=0.0) == pytest.approx(120)


def test_a_budgets_parts() -> None:
    own = SumBudget(1.0, 1e-5, 10, once=0.1, clients=4)
    rho = budget(1.0, 1e-5)
    assert own.width(1e5) == pytest.approx(1e5 / math.sqrt(2 * 0.09 * rho * 4))
    assert own.width_once(1e5) == pytest.approx(1e5 / math.sqrt(2 * 0.1 * rho * 4))
    assert own.spent(10) == pytest.approx(1.0)
    assert own.spent(1) < own.spent(5) < 1.0
    assert own.spent(5) == own.spent(5, 1.0)
    with pytest.raises(ConfigError, match="no privacy"):
        own.width(0.1)


def test_sampling_makes_room_for_narrower_noise() -> None:
    always, sampled = (SumBudget(1.0, 1e-5, 20, once=0.1, rate=rate) for rate in (1.0, 1 / 15))
    assert sampled.width(1e5) < 0.5 * always.width(1e5)
    assert sampled.spent(20) == pytest.approx(1.0)
    assert sampled.spent(20, 1.0) > 2.0
