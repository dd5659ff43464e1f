"""The quantiser's statistics, and its codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from ntkfl_experiments.rivals.qsgd import (
    Bytes,
    Floats,
    Levels,
    decode_levels,
    dequantize,
    encode_levels,
    quantize,
    top_level,
)

from ntkfl.errors import MessageError

NORMS = ("l2", "max")


def draws(n: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).random(n)


def vector(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bits", [2, 3, 5])
def test_rounding_is_unbiased_and_within_the_papers_variance(norm: str, bits: int) -> None:
    n, trials, s = 60, 20_000, top_level(bits)
    v, uniforms = vector(n), draws(n * trials).reshape(trials, n)
    found = torch.stack([dequantize(*quantize(v, bits, own, norm), bits) for own in uniforms])
    scale = float(v.norm() if norm == "l2" else v.abs().max())
    error = (found.mean(0) - v).abs()
    assert float((error / (found.std(0) / trials**0.5).clamp(min=1e-7 * scale)).max()) < 4.5
    variance = float((found - v).square().sum(1).mean())
    if norm == "l2":
        assert variance <= min(n / s**2, n**0.5 / s) * float(v.square().sum())
    assert variance <= n / (4 * s**2) * scale**2  # rounding between neighbours a step apart has at most ¼ step²
    assert variance > 0.1 * n / (4 * s**2) * scale**2 / (n if norm == "l2" else 1)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-1e38, 1e38) | st.sampled_from([0.0, 5e-324, 1e-300, -1e-45, 3e37, -3e37]), max_size=40),
    st.integers(2, 16),
    st.sampled_from(NORMS),
    st.integers(0, 99),
)
@example([1e-200], 4, "l2", 0)
@example([], 4, "l2", 0)
def test_values_of_any_size_fall_on_a_neighbouring_level(values: list[float], bits: int, norm: str, seed: int) -> None:
    v = torch.tensor(values, dtype=torch.float64)
    levels, scale = quantize(v, bits, draws(len(v), seed), norm)
    assert np.abs(levels).max(initial=0) <= top_level(bits)
    back = dequantize(levels, scale, bits)
    assert bool(((back - v).abs() <= scale / top_level(bits) * (1 + 1e-9)).all())
    assert bool((back * v >= 0).all())
    exact = float(torch.linalg.vector_norm(v, 2 if norm == "l2" else torch.inf)) if values else 0.0
    assert scale >= float(v.abs().max()) if values else scale == 0
    if exact > 1e-37:
        assert scale == pytest.approx(exact, rel=2e-7)


def level_arrays(limit: int = 60) -> st.SearchStrategy[tuple[int, Levels]]:
    """(bits, levels), of which many are zero."""

    def of(bits: int) -> st.SearchStrategy[tuple[int, Levels]]:
        top = top_level(bits)
        elements = st.just(0) | st.integers(-top, top) | st.sampled_from([-top, top])
        return st.tuples(
            st.just(bits), arrays.arrays(np.int32, st.integers(0, limit), elements=elements, fill=st.just(0))
        )

    return st.integers(2, 16).flatmap(of)


@settings(max_examples=300, deadline=None)
@given(level_arrays())
def test_levels_come_back_exactly(case: tuple[int, Levels]) -> None:
    bits, levels = case
    data = encode_levels(levels, bits)
    back = decode_levels(data, len(levels), bits)
    assert back.dtype == np.int32
    assert np.array_equal(back, levels)
    assert len(data) == -(-len(levels) * bits // 8)


def packed(stream: str) -> Bytes:
    return np.packbits(np.array(list(map(int, stream)), dtype=np.uint8))


def test_codes_are_sign_and_magnitude_and_what_is_none_is_refused() -> None:
    assert np.array_equal(encode_levels(np.array([3, -1, 0], dtype=np.int32), 3), packed("0111010000000000"))
    for data, n, why in (
        (packed("10000001"), 2, "minus zero"),
        (packed("00010001"), 1, "too many"),
        (packed("0" * 16), 2, "take 1 bytes"),
    ):
        with pytest.raises(MessageError, match=why):
            decode_levels(data, n, 4)
