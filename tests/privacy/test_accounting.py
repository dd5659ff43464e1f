"""(ε, δ) against formulas one can write down."""

from __future__ import annotations

import math
import sys

import pytest
from scipy.stats import norm

from ntkfl.errors import ConfigError
from ntkfl.privacy.accounting import SIMULATED, client_guarantees, gaussian_epsilon


@pytest.mark.parametrize("noise", [0.5, 2.0, 8.0])
def test_the_gaussian_mechanism_of_sensitivity_two(noise: float) -> None:
    """δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) with μ = 2/noise: replacing moves a clipped vector by 2 clips at most."""
    epsilon, mu = gaussian_epsilon(noise, 1e-5), 2 / noise
    delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("simulated", [False, True])
def test_a_simulations_guarantees_say_that_they_are(simulated: bool) -> None:
    """Its noise follows from a seed that everybody may know: the numbers are a deployment's, which it is not."""
    for guarantee in client_guarantees(2.0, cohort=20, clients=300, rounds=10, times=4, simulated=simulated):
        assert guarantee.simulated is simulated
        assert ("(simulated)" in str(guarantee)) is simulated
        assert (SIMULATED in guarantee.assumptions) is simulated
        assert any("operating system" in text for text in guarantee.assumptions) is not simulated


def test_a_clients_guarantees() -> None:
    one, many, outside = client_guarantees(2.0, cohort=20, clients=300, rounds=10, times=4)
    assert one.epsilon == gaussian_epsilon(2.0, 1e-5)
    assert many.epsilon == gaussian_epsilon(1.0, 1e-5)  # four times is half the noise
    assert outside.epsilon < one.epsilon
    assert client_guarantees(0.0, cohort=20, clients=300, rounds=10, times=4) == []


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.gaussian_mechanism", None)
    with pytest.raises(ConfigError, match="pip install 'dp-accounting"):
        gaussian_epsilon(1.0, 1e-5)
