"""The quantiser's statistics, and its codes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from ntkfl.errors import MessageError
from ntkfl.wire.quantize import (
    Bytes,
    Levels,
    decode_levels,
    dequantize,
    encode_levels,
    norm_count,
    quantize,
    top_level,
)

NORMS = ("l2", "max")
norms_and_buckets = pytest.mark.parametrize(("norm", "bucket"), [(n, b) for n in NORMS for b in (None, 1, 16, 1000)])


def rng(seed: int = 0) -> Callable[[int], NDArray[np.float64]]:
    return np.random.default_rng(seed).random


def vector(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Rounding.


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bits", [2, 3, 5])
def test_rounding_is_unbiased_and_within_the_papers_variance(norm: str, bits: int) -> None:
    n, trials, s = 60, 20_000, top_level(bits)
    v = vector(n)
    levels, norms = quantize(v.repeat(trials), bits, rng(), norm, bucket=n)  # every bucket is one draw of Q(v)
    draws = dequantize(levels, norms, bits, bucket=n).view(trials, n)
    scale = float(v.norm() if norm == "l2" else v.abs().max())
    error = (draws.mean(0) - v).abs()
    assert float((error / (draws.std(0) / trials**0.5).clamp(min=1e-7 * scale)).max()) < 4.5
    variance = float((draws - v).square().sum(1).mean())
    if norm == "l2":
        assert variance <= min(n / s**2, n**0.5 / s) * float(v.square().sum())
    assert variance <= n / (4 * s**2) * scale**2  # rounding between neighbours a step apart has at most ¼ step²
    assert variance > 0.1 * n / (4 * s**2) * scale**2 / (n if norm == "l2" else 1)


@norms_and_buckets
def test_values_fall_on_a_neighbouring_level(norm: str, bucket: int | None) -> None:
    n, bits = 203, 4
    v = vector(n)
    levels, norms = quantize(v, bits, rng(), norm, bucket)
    assert levels.dtype == np.int32
    assert norms.dtype == np.float32
    assert len(norms) == norm_count(n, bucket)
    parts = v.split(bucket or n)
    expected = [float(p.norm() if norm == "l2" else p.abs().max()) for p in parts]
    np.testing.assert_allclose(norms, expected, rtol=2e-7)
    steps = torch.from_numpy(np.repeat(norms.astype(np.float64), bucket or n)[:n]) / top_level(bits)
    back = dequantize(levels, norms, bits, bucket)
    assert bool(((back - v).abs() < steps * (1 + 1e-12)).all())
    assert bool((back * v >= 0).all())
    assert not np.array_equal(levels, quantize(v, bits, rng(1), norm, bucket)[0]) or bucket == 1
    assert np.array_equal(levels, quantize(v, bits, rng(), norm, bucket)[0])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-1e38, 1e38) | st.sampled_from([0.0, 5e-324, 1e-300, -1e-45, 3e37, -3e37]), max_size=40),
    st.integers(2, 16),
    st.sampled_from(NORMS),
    st.none() | st.integers(1, 50),
    st.integers(0, 99),
)
@example([1e-200], 4, "l2", None, 0)
@example([], 4, "l2", None, 0)
def test_extreme_magnitudes(values: list[float], bits: int, norm: str, bucket: int | None, seed: int) -> None:
    v = torch.tensor(values, dtype=torch.float64)
    levels, norms = quantize(v, bits, rng(seed), norm, bucket)
    assert np.abs(levels).max(initial=0) <= top_level(bits)
    back = dequantize(levels, norms, bits, bucket)
    width = bucket or max(len(values), 1)
    step = np.repeat(norms.astype(np.float64), width)[: len(values)] / top_level(bits)
    assert ((back - v).abs().numpy() <= step * (1 + 1e-9)).all()
    for part, scale in zip(v.split(width), norms, strict=False):
        assert float(scale) >= float(part.abs().max())


# Codes.


def as_bits(data: Bytes) -> str:
    return "".join(map(str, np.unpackbits(data)))


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
    assert data.dtype == np.uint8
    assert back.dtype == np.int32
    assert np.array_equal(back, levels)
    assert len(data) == -(-len(levels) * bits // 8)


def test_fixed_codes_are_sign_and_magnitude() -> None:
    assert as_bits(encode_levels(np.array([3, -1, 0], dtype=np.int32), 3)) == "0111010000000000"
    assert len(encode_levels(np.zeros(79_510, dtype=np.int32), 4)) == 39_755


# What is no code.


def packed(stream: str) -> Bytes:
    return np.packbits(np.array(list(map(int, stream)), dtype=np.uint8))


def test_minus_zero_and_stray_bits_are_refused() -> None:
    with pytest.raises(MessageError, match="minus zero"):
        decode_levels(packed("1000" + "0001"), 2, 4)
    with pytest.raises(MessageError, match="too many"):
        decode_levels(packed("0001" + "0001"), 1, 4)
