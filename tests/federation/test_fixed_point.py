"""Fixed point against exact fractions: no sum wraps, nothing is biased, whole numbers stay whole."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ntkfl.errors import NumericalError
from ntkfl.federation.secure_sum import fit, from_words, scale_of, to_words

limits = st.floats(1e-9, 1e9)
ROUNDED_UP, ROUNDED_DOWN = 0.0, 1 - 2.0**-53


@given(limits, st.integers(1, 100_000))
@example(1.0, 1)
@example(2.0**30, 2)
def test_the_scale_is_the_largest_power_of_two_with_which_no_sum_wraps(limit: float, clients: int) -> None:
    scale = Fraction(scale_of(limit, clients))
    assert scale.numerator == 1 or scale.denominator == 1
    assert (scale.numerator * scale.denominator).bit_count() == 1
    assert clients * math.ceil(Fraction(limit) * scale) < 2**31 <= clients * math.ceil(Fraction(limit) * 2 * scale)


@given(limits, st.integers(1, 50), st.booleans())
def test_the_sum_of_the_largest_numbers_decodes(limit: float, clients: int, negative: bool) -> None:
    """The worst that can happen: all clients at their limit, all rounded away from zero."""
    scales = np.array([scale_of(limit, clients)])
    value = np.array([-limit if negative else limit])
    away = np.array([ROUNDED_DOWN if negative else ROUNDED_UP])
    total = np.zeros(1, dtype=np.uint32)
    for _ in range(clients):
        total += to_words(value, scales, away)
    decoded = float(from_words(total, scales)[0])
    assert (decoded < 0) == negative
    assert abs(Fraction(decoded) - clients * Fraction(float(value[0]))) <= clients / Fraction(float(scales[0]))


fractions = st.integers(-(100 << 20), 100 << 20).map(lambda number: number / (1 << 20))  # whose remainders are exact


@given(st.lists(fractions, min_size=1, max_size=20), st.integers(-10, 20), st.floats(0, ROUNDED_DOWN))
def test_rounding_is_down_or_up_as_the_uniform_says(values: list[float], exponent: int, uniform: float) -> None:
    scale = 2.0**exponent
    words = to_words(np.array(values), np.full(len(values), scale), np.full(len(values), uniform))
    for word, value in zip(words.tolist(), values, strict=True):
        exact = Fraction(value) * Fraction(scale)
        assert word == (math.floor(exact) + (Fraction(uniform) < exact - math.floor(exact))) % 2**32


def test_rounding_has_no_bias() -> None:
    """Of n uniforms at distance 1/n, as many round up as the remainder says: the mean is off by at most 1/n."""
    n = 10_000
    uniforms = (np.arange(n) + 0.5) / n
    for value in (0.1, -0.1, 2.75, -3.3333, 1e-3):
        words = to_words(np.full(n, value), np.ones(n), uniforms)
        assert abs(words.view(np.int32).mean() - value) <= 1 / n


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=10), st.integers(1, 300))
def test_whole_numbers_stay_whole(values: list[int], clients: int) -> None:
    scales = np.full(len(values), scale_of(1000.0, clients))
    for uniform in (ROUNDED_UP, ROUNDED_DOWN):
        words = to_words(np.array(values, dtype=float), scales, np.full(len(values), uniform))
        assert from_words(words, scales).tolist() == values


def test_what_is_too_large_is_scaled_down_as_a_whole() -> None:
    values, bounded = fit(np.array([30.0, -40.0, 0.0]), 4.0)
    assert bounded
    assert np.allclose(values, [3.0, -4.0, 0.0])
    same, bounded = fit(np.array([4.0, -4.0]), 4.0)
    assert not bounded
    assert same.tolist() == [4.0, -4.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_client_without_finite_numbers_leaves_the_round(value: float) -> None:
    with pytest.raises(NumericalError, match="leaves the round"):
        fit(np.array([0.0, value]), 1.0)
