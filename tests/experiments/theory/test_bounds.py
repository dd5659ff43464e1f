"""The bounds: values by hand, and how they relate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ntkfl_experiments.theory import bounds

positive = st.floats(1e-6, 1e3)
small = st.floats(1e-3, 0.999)


def test_by_hand() -> None:
    # R/α = √(π/2)/10 makes √(2/π) R/α = 0.1.
    radius = math.sqrt(math.pi / 2) / 10
    assert bounds.flip_probability(radius, 1) == pytest.approx(0.1)
    assert bounds.flip_probability(100, 1) == 1
    assert bounds.flips(200, radius, 1, 0.5) == pytest.approx(40)
    assert bounds.flips_everywhere(200, radius, 1, 0.5, 3) == pytest.approx(120)
    assert bounds.flips_concentrated(200, radius, 1, 0.5, 4) == pytest.approx(20 + math.sqrt(100 * math.log(8)))
    assert bounds.kernel_drift(5, radius, 1, 0.5) == pytest.approx(2)
    assert bounds.kernel_drift_summed(5, radius, 1, 0.5) == pytest.approx(10)
    assert bounds.kernel_drift_moment(4, 5, radius, 1, 0.5) == pytest.approx(5 * math.sqrt((0.04 + 0.05) / 0.5))
    assert bounds.kernel_deviation(8, 3, 0.18) == pytest.approx(3 * math.sqrt(math.log(100) / 16))
    assert bounds.kernel_deviation_gram(8, 2.0, 3, 0.12) == pytest.approx(2 * math.sqrt(math.log(100) / 16))
    # √(2·2·4) = 4 over √π·½·1, times η Σγ = 0.1·3
    assert bounds.weight_gap(2, 4, 0.1, 1, 0.5, [1, 2]) == pytest.approx(4 * 2 / math.sqrt(math.pi) * 0.3)
    assert bounds.weight_gap_certain(2, 8, 0.1, [1, 2]) == pytest.approx(4 * 0.3)
    assert bounds.residual_gap(2, 8, 0.1, [1, 2]) == pytest.approx(4 * 0.3)
    assert bounds.reach(4, 0.1, [1, 2]) == pytest.approx(0.15)


@given(n=st.integers(1, 10**6), d1=st.integers(1, 1000), lr=positive, alpha=positive, delta=small, radius=positive)
def test_lemma_2_is_lemma_1_put_into_its_proof(
    n: int, d1: int, lr: float, alpha: float, delta: float, radius: float
) -> None:
    gammas = [0.5, 0.25]
    by_hand = lr * sum(gammas) * math.sqrt(d1 / n) * bounds.flips(n, radius, alpha, delta)
    assert bounds.weight_gap_within(n, d1, lr, alpha, delta, gammas, radius) == pytest.approx(by_hand)
    assert bounds.weight_gap_within(n, d1, lr, alpha, delta, gammas, radius) == pytest.approx(
        radius * bounds.weight_gap(n, d1, lr, alpha, delta, gammas)
    )
    furthest = bounds.reach(n, lr, [1.0, *gammas])
    explicit = bounds.weight_gap_explicit(d1, lr, alpha, delta, gammas, first=1.0)
    assert explicit == pytest.approx(bounds.weight_gap_within(n, d1, lr, alpha, delta, gammas, furthest))


@given(n=st.integers(1, 10**5), samples=st.integers(1, 500), ratio=st.floats(1e-8, 0.4), delta=small)
def test_the_second_moment_proves_lemma_3_where_enough_neurons_can_flip(
    n: int, samples: int, ratio: float, delta: float
) -> None:
    p = 2 * math.sqrt(2 / math.pi) * ratio
    moment, printed = (
        bounds.kernel_drift_moment(n, samples, ratio, 1, delta),
        bounds.kernel_drift(samples, ratio, 1, delta),
    )
    if n * p >= delta / (1 - delta) * (1 + 1e-9):
        assert moment <= printed * (1 + 1e-12)
    elif n * p <= delta / (1 - delta) * (1 - 1e-9):
        assert moment >= printed * (1 - 1e-12)
    assert printed <= bounds.kernel_drift_summed(samples, ratio, 1, delta)


@given(n=st.integers(1, 10**6), samples=st.integers(1, 1000), delta=small)
def test_lemma_4_with_the_gram_matrix_is_the_sharper(n: int, samples: int, delta: float) -> None:
    # Unit inputs have ‖XXᵀ‖_F ≤ N.
    assert bounds.kernel_deviation_gram(n, samples, samples, delta) <= bounds.kernel_deviation(n, samples, delta) * (
        1 + 1e-12
    )
    assert bounds.kernel_deviation(4 * n, samples, delta) == pytest.approx(
        bounds.kernel_deviation(n, samples, delta) / 2
    )
