"""(ε, δ) of noise on sums: the closed form, dp-accounting, and the privacy loss of the mechanism itself."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ntkfl.errors import ConfigError
from ntkfl.privacy.sum_accounting import budget, concentrated, epsilon_of, guarantee


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
        assert epsilon * (1 - 1e-6) < epsilon_of(rho, delta) <= epsilon
        assert epsilon_of(1.01 * rho, delta) > epsilon
        # never better than the Gaussian mechanism with this ρ, of which δ is known exactly, and not much worse
        exact = gaussian_delta(epsilon, 1 / math.sqrt(2 * rho))
        assert exact < delta < 30 * exact
    assert epsilon_of(0.0, 1e-5) == 0
    for epsilon, delta in ((0.0, 1e-5), (1.0, 0.0), (1.0, 1.0)):
        with pytest.raises(ConfigError):
            budget(epsilon, delta)


def gaussian_delta(epsilon: float, sigma: float) -> float:
    """Balle & Wang 2018, theorem 8, at sensitivity 1."""

    def below(t: float) -> float:
        return 0.5 * math.erfc(-t / math.sqrt(2))

    return below(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * below(-0.5 / sigma - epsilon * sigma)


def test_dp_accounting_says_what_the_closed_form_says() -> None:
    rho = budget(3.0, 1e-5)
    found = guarantee(
        [(0.1 * rho, 1), (0.9 * rho / 20, 20)], 1e-5, clients=270, against="the servers", secure=True, simulated=True
    )
    assert found.epsilon == pytest.approx(3.0, rel=1e-3)
    assert found.epsilon <= 3.0 + 1e-9
    assert found.unit == "record"
    assert any("270" in line for line in found.assumptions)
    assert any("collude" in line for line in found.assumptions)
