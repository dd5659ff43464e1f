"""Decay factors, and requirements that do what they are for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ntkfl_experiments.theory.bounds import reach
from ntkfl_experiments.theory.decay import (
    descent_factor,
    fedavg_factor,
    flow_factor,
    proof_factor,
    requirements,
)

from ntkfl.errors import ConfigError


def test_by_hand() -> None:
    assert descent_factor(1.0, 0.5, 5, 2) == pytest.approx(0.95**2)
    with pytest.raises(ConfigError, match="ηλ < 2N"):
        descent_factor(20.0, 0.5, 5, 1)
    assert fedavg_factor(1.0, 0.5, 5, 3, clients=2) == pytest.approx(1 - 3 * 0.05 / 2)
    assert fedavg_factor(1.0, 0.5, 5, 3) == pytest.approx(1 - 3 * 0.05)
    assert flow_factor(1.0, 0.5, 5, 2) == pytest.approx(math.exp(-0.4))
    # 1 + 8√(2/π)·0.1·R with R = √(π/2)/8 is 1.1 at δα = 1; n so large that its term is gone.
    radius = math.sqrt(math.pi / 2) / 8
    assert proof_factor(0.1, 0.5, 5, 10**18, radius, 1, 1) == pytest.approx(1 + 0.1 - 0.02 + 0.01, abs=1e-7)


@given(
    samples=st.integers(1, 10_000), smallest=st.floats(1e-6, 0.5), alpha=st.floats(0.01, 10), delta=st.floats(1e-4, 0.5)
)
def test_requirements_make_the_proof_go_through(samples: int, smallest: float, alpha: float, delta: float) -> None:
    asked = requirements(samples, smallest, alpha, delta)
    n = math.ceil(asked.width)
    lr = asked.lr
    allowed = 1 - lr * smallest / (2 * samples)
    tight = proof_factor(lr, smallest, samples, n, asked.radius, alpha, delta)
    assert tight <= allowed + 1e-15
    # None can be relaxed alone: twice the radius, the rate, or half the width's term is too much.
    gained = lr * smallest / (2 * samples)
    if gained > 1e-9:
        assert proof_factor(lr, smallest, samples, n, 2.1 * asked.radius, alpha, delta) > allowed
        assert proof_factor(lr, smallest, samples, n // 5, asked.radius, alpha, delta) > allowed
        faster = 2.1 * lr
        faster_allowed = 1 - faster * smallest / (2 * samples)
        assert proof_factor(faster, smallest, samples, n, asked.radius, alpha, delta) > faster_allowed


@given(samples=st.integers(1, 1000), smallest=st.floats(1e-4, 0.5), start=st.floats(0.1, 10))
def test_the_width_to_stay_keeps_weights_within_the_radius(samples: int, smallest: float, start: float) -> None:
    asked = requirements(samples, smallest, 1.0, 0.1, squared_residual=start * samples)
    # mean |r_i| ≤ ‖r‖/√N, and ‖r(u)‖ falls by the root of Theorem 1's factor: a geometric sum.
    ratio = math.sqrt(descent_factor(asked.lr, smallest, samples, 1))
    total = (
        math.sqrt(start) / (1 - ratio) if ratio < 1 - 1e-12 else math.sqrt(start) * 4 * samples / (asked.lr * smallest)
    )
    assert reach(math.ceil(asked.width_to_stay), asked.lr, [total]) <= asked.radius * (1 + 1e-3)


@given(lr=st.floats(1e-6, 1.0), smallest=st.floats(1e-6, 0.5), samples=st.integers(1, 1000), steps=st.integers(1, 1000))
def test_the_linearised_flow_is_inside_theorem_1(lr: float, smallest: float, samples: int, steps: int) -> None:
    # A quarter of λ is enough: e^{−2ηt(λ/4)/N} ≤ (1 − ηλ/2N)^t would be e^{−x} ≤ 1 − x, so a little more is needed.
    assert flow_factor(lr, 0.3 * smallest, samples, steps) <= descent_factor(lr, smallest, samples, steps) * (1 + 1e-12)
