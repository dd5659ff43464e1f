"""Integers of sums: how far one contribution moves them, and the parts of a budget."""

from __future__ import annotations

import math

import pytest
import torch

from ntkfl.errors import ConfigError
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.sum_accounting import budget
from ntkfl.privacy.sum_noise import COUNT, GRAINS, SumBudget, integer_change, to_integers


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
