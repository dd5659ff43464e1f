"""(ε, δ) against formulas one can write down, and theorems that are only used where they hold."""

from __future__ import annotations

import math
import sys

import pytest
from scipy.stats import norm

from ntkfl.errors import ConfigError
from ntkfl.privacy.accounting import (
    SIMULATED,
    client_guarantees,
    composed,
    gaussian_epsilon,
    record_guarantees,
    row_epsilon,
    shuffled,
    subsampled,
)


@pytest.mark.parametrize("noise", [0.5, 2.0, 8.0])
def test_the_gaussian_mechanism_of_sensitivity_two(noise: float) -> None:
    """δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) with μ = 2/noise: replacing moves a clipped vector by 2 clips at most."""
    epsilon, mu = gaussian_epsilon(noise, 1e-5), 2 / noise
    delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=1e-3)


def test_labels_count_and_count_again_in_every_round() -> None:
    """With inputs drowned, ε is that of randomised response, ln((1 − p + p/k)/(p/k)), and twice that in two rounds."""
    response = math.log((1 - 0.3 + 0.03) / 0.03)
    assert row_epsilon(1e4, 0.3, 10, 1e-9) == pytest.approx(response, abs=0.01)
    assert row_epsilon(1e4, 0.3, 10, 1e-9, times=2) == pytest.approx(2 * response, abs=0.02)
    both = row_epsilon(2.0, 0.3, 10, 1e-5)
    assert max(response, gaussian_epsilon(2.0, 1e-5)) < both <= response + gaussian_epsilon(2.0, 1e-5)
    assert row_epsilon(2.0, 1.0, 10, 1e-5) == gaussian_epsilon(2.0, 1e-5)
    assert row_epsilon(2.0, 0.0, 10, 1e-5) == row_epsilon(0.0, 0.5, 10, 1e-5) == math.inf
    assert row_epsilon(0.01, 0.5, 10, 1e-5) > 1e4  # too large to be worth composing finely, and still an upper bound


def test_subsampling() -> None:
    assert subsampled(2.0, 1e-5, 1.0) == pytest.approx((2.0, 1e-5))
    assert subsampled(2.0, 1e-5, 0.3)[0] == pytest.approx(math.log(1 + 0.3 * (math.exp(2) - 1)))
    assert subsampled(1e5, 1e-5, 0.3)[0] == pytest.approx(1e5 + math.log(0.3))  # no overflow


def test_shuffling_only_where_its_theorem_holds() -> None:
    found = shuffled(1.0, 0.0, 4000, 1e-5)
    assert found is not None
    e0 = math.e
    by_hand = math.log(1 + (e0 - 1) / (e0 + 1) * (8 * math.sqrt(e0 * math.log(4e5)) / math.sqrt(4000) + 8 * e0 / 4000))
    assert found == pytest.approx((by_hand, 1e-5))
    assert by_hand < 1
    limit = math.log(4000 / (16 * math.log(2e5)))
    assert shuffled(limit + 1e-6, 0.0, 4000, 1e-5) is None
    assert shuffled(1.0, 0.0, 20, 1e-5) is None  # a round's clients are too few
    with_delta = shuffled(1.0, 1e-10, 4000, 1e-5)
    assert with_delta is not None
    assert with_delta[1] == pytest.approx(1e-5 + (math.exp(by_hand) + 1) * (1 + math.exp(-1) / 2) * 4000 * 1e-10)


def test_composition() -> None:
    assert composed(0.5, 1e-8, 1, 1e-5) == 0.5
    assert 0.5 < composed(0.1, 1e-9, 50, 1e-5) < 50 * 0.1
    assert composed(30.0, 1e-9, 3, 1e-5) == 90


def test_a_records_guarantees_say_what_they_assume() -> None:
    strong = record_guarantees(24.0, 0.9, 10, times=3, rate=0.3, rows=1200, shuffle=True)
    by = {g.against: g for g in strong}
    one = by["the aggregator, one round"].epsilon
    mixed = by["the aggregator behind the shuffler, one round"]
    assert mixed.epsilon < one < by["the aggregator, 3 rounds"].epsilon
    assert any("shuffler is honest" in text for text in mixed.assumptions)
    assert all(g.delta == 1e-5 and g.unit == "record" and g.assumptions for g in strong)
    weak = record_guarantees(2.0, 0.2, 10, times=3, rate=1.0, rows=1200, shuffle=True)
    assert not any("shuffler" in g.against or "sampled" in g.against for g in weak)
    (none,) = record_guarantees(2.0, 0.0, 10, times=3, rate=1.0, rows=1200, shuffle=True)
    assert math.isinf(none.epsilon)
    assert "label_flip" in none.assumptions[0]
    assert "no finite ε" in str(none)
    assert record_guarantees(0.0, 0.2, 10, times=3, rate=1.0, rows=10, shuffle=True) == []


@pytest.mark.parametrize("simulated", [False, True])
def test_a_simulations_guarantees_say_that_they_are(simulated: bool) -> None:
    """Its noise follows from a seed that everybody may know: the numbers are a deployment's, which it is not."""
    found = [
        *record_guarantees(24.0, 0.9, 10, times=3, rate=0.3, rows=1200, shuffle=True, simulated=simulated),
        *client_guarantees(2.0, cohort=20, clients=300, rounds=10, times=4, simulated=simulated),
    ]
    for guarantee in found:
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
