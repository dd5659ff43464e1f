"""Subsampling: the right number, uniform, without replacement, and off at β = 1."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from ntkfl.privacy.subsample import equal_rows, subsample


@given(st.integers(1, 500), st.floats(1e-6, 1.0, exclude_min=True), st.integers(0, 10))
def test_size_and_order(count: int, rate: float, seed: int) -> None:
    rows = subsample(count, rate, random.Random(seed)).tolist()
    assert len(rows) == max(1, int(rate * count + 0.5))
    assert rows == sorted(set(rows))
    assert rows[0] >= 0
    assert rows[-1] < count


def test_one_is_the_identity_and_draws_nothing() -> None:
    class Untouched(random.Random):
        def sample(self, *_: object, **__: object) -> list[int]:  # type: ignore[override]
            raise AssertionError("drawn from")

    assert torch.equal(subsample(7, 1.0, Untouched()), torch.arange(7))


def test_every_sample_is_as_likely() -> None:
    draws = random.Random(0)
    counts = torch.zeros(10)
    for _ in range(4000):
        counts[subsample(10, 0.3, draws)] += 1
    assert counts.sum() == 4000 * 3
    assert (counts / 4000 - 0.3).abs().max() < 0.03


def test_no_more_than_every_client_sends() -> None:
    rows = subsample(100, 0.5, random.Random(3), most=20)
    assert len(rows) == 20
    assert set(rows.tolist()) < set(subsample(100, 0.5, random.Random(3)).tolist())
    assert torch.equal(subsample(7, 1.0, random.Random(0), most=7), torch.arange(7))
    counts = torch.zeros(10)
    for _ in range(4000):
        counts[subsample(10, 0.5, random, most=2)] += 1  # type: ignore[arg-type]
    assert (counts / 4000 - 0.2).abs().max() < 0.03


def test_rows_for_all_are_the_largest_clients_but_no_more_than_one_and_a_half_medians() -> None:
    assert equal_rows([72, 72, 73, 72], 1.0) == 73
    assert equal_rows([72, 72, 73, 72], 0.3) == 22
    assert equal_rows([10, 20, 20, 30, 1000], 1.0) == 30
    assert equal_rows([10, 20, 20, 25, 1000], 0.5) == 15
    assert equal_rows([5], 0.01) == 1
