"""Robust combinations against hand-computed cases, and what they promise against any minority."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ntkfl.methods.robust import Robust, clip_factors, fair_counts, median, trimmed_mean


def test_by_hand() -> None:
    updates = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 4.0], [100.0, -1.0]])
    assert median(updates).tolist() == [2.5, 0.0]
    assert trimmed_mean(updates, 0.25).tolist() == [2.5, 0.0]
    assert trimmed_mean(updates, 0.2).tolist() == pytest.approx([26.5, 0.75])  # ⌊0.8⌋ = none
    factors = clip_factors(torch.tensor([1.0, 2.0, 5.0, 100.0]), 1.2)
    assert factors.tolist() == pytest.approx([1, 1, 1.2 * 3.5 / 5, 1.2 * 3.5 / 100])


def test_what_a_client_says_of_its_size_counts_up_to_a_multiple_of_the_median() -> None:
    assert fair_counts(torch.tensor([70, 72, 71, 1000]), 1.5).tolist() == [70, 72, 71, 107]
    assert fair_counts(torch.tensor([1, 1, 5]), 1.5).tolist() == [1, 1, 1]
    assert fair_counts(torch.tensor([10.0, 20.0, 30.0]), 2).tolist() == [10, 20, 30]
    assert fair_counts(torch.tensor([1, 100]), 1.5).tolist() == [1, 100]  # of two, neither is the measure


def test_one_client_moves_a_clipped_mean_by_its_share_of_the_bound() -> None:
    draws = torch.Generator().manual_seed(0)
    honest = torch.randn(19, 4, generator=draws).double()
    p = torch.full((20,), 0.05).double()
    base = torch.ones(4).double()
    for size in (0.1, 10.0, 1e20):
        byzantine = size * torch.randn(4, generator=draws).double()
        for at in (None, base):
            vectors = [v if at is None else at + v for v in (*honest, byzantine)]
            moved = Robust(updates="clip").combine(vectors, p, at) - (0 if at is None else at)
            middle = float(median(torch.stack([*honest, byzantine]).norm(dim=1)))
            clipped = torch.stack([v * min(1.0, 1.5 * middle / float(v.norm())) for v in honest])
            assert (moved - clipped.sum(0) / 20).norm() <= 1.5 * middle / 20 * (1 + 1e-6)
    alike = honest / honest.norm(dim=1, keepdim=True)  # none is longer: the mean, to the bit
    assert torch.equal(Robust(updates="clip").combine(list(alike), p[:19]), Robust().combine(list(alike), p[:19]))


@given(st.integers(5, 25), st.integers(0, 1000), st.floats(1, 1e20))
@settings(max_examples=40, deadline=None)
def test_no_minority_moves_a_coordinate_out_of_the_honest_range(honest: int, seed: int, size: float) -> None:
    draws = torch.Generator().manual_seed(seed)
    good = torch.randn(honest, 3, generator=draws, dtype=torch.float64)
    bad = size * torch.randn((honest - 1) // 4, 3, generator=draws, dtype=torch.float64)
    everybody = [*good, *bad]
    for result in (median(torch.stack(everybody)), trimmed_mean(torch.stack(everybody), 0.25)):
        assert bool((result <= good.amax(0)).all())
        assert bool((result >= good.amin(0)).all())


def test_trimming_nothing_is_the_mean_and_half_the_median() -> None:
    values = torch.randn(7, 2).double()
    assert torch.allclose(trimmed_mean(values, 0.0), values.mean(0))
    assert torch.allclose(trimmed_mean(values, 0.49), median(values))
    assert float(median(torch.tensor([4.0, 1.0]))) == 2.5
