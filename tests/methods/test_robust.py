"""Robust combinations against hand-computed cases, and what they promise against any minority."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ntkfl
from ntkfl.methods import FedAvg, Task
from ntkfl.methods.robust import (
    budget,
    clip_factors,
    clip_rows,
    combine,
    fair_counts,
    median,
    no_costs,
    opposed,
    surplus_left_out,
    trimmed_mean,
    true_rows,
    verifiable,
    with_cost,
    without_outliers,
)
from tests.methods.rounds import small_clients, small_task


def test_by_hand() -> None:
    updates = [torch.tensor(v) for v in ([1.0, 0.0], [2.0, 0.0], [3.0, 4.0], [100.0, -1.0])]
    assert combine("median", updates, 0).tolist() == [2.5, 0.0]
    assert combine("trimmed", updates, 0.25).tolist() == [2.5, 0.0]
    assert combine("trimmed", updates, 0.2).tolist() == pytest.approx([26.5, 0.75])  # ⌊0.8⌋ = none
    factors = clip_factors(torch.tensor([1.0, 2.0, 5.0, 100.0]), 1.2)
    assert factors.tolist() == pytest.approx([1, 1, 1.2 * 3.5 / 5, 1.2 * 3.5 / 100])


def test_what_a_client_says_of_its_size_counts_up_to_a_multiple_of_the_median() -> None:
    assert fair_counts(torch.tensor([70, 72, 71, 1000]), 1.5).tolist() == [70, 72, 71, 107]
    assert fair_counts(torch.tensor([1, 1, 5]), 1.5).tolist() == [1, 1, 1]
    assert fair_counts(torch.tensor([10.0, 20.0, 30.0]), 2).tolist() == [10, 20, 30]
    assert fair_counts(torch.tensor([1, 100]), 1.5).tolist() == [1, 100]  # of two, neither is the measure
    drawn = surplus_left_out(1000, 107, round=3)
    assert len(drawn.unique()) == 107
    assert bool((drawn.diff() > 0).all())
    assert torch.equal(drawn, surplus_left_out(1000, 107, round=3))
    assert not torch.equal(drawn, surplus_left_out(1000, 107, round=4))


def test_a_budget_is_five_times_the_median_of_the_last_five_rounds() -> None:
    costs = no_costs()
    assert budget(costs) is None
    costs = with_cost(costs, 900)
    assert budget(costs) == 4500
    for cost in (100, 110, 120, 5000, 130):
        costs = with_cost(costs, cost)
    assert costs.tolist() == [100, 110, 120, 5000, 130]
    assert budget(costs) == 600


def test_one_client_moves_a_clipped_mean_by_its_share_of_the_bound() -> None:
    draws = torch.Generator().manual_seed(0)
    honest = torch.randn(19, 4, generator=draws).double()
    p = torch.full((20,), 0.05).double()
    base = torch.ones(4).double()
    for size in (0.1, 10.0, 1e20):
        byzantine = size * torch.randn(4, generator=draws).double()
        for at in (None, base):
            vectors = [v if at is None else at + v for v in (*honest, byzantine)]
            moved = FedAvg(robust="clip").combine(vectors, p, at) - (0 if at is None else at)
            middle = float(median(torch.stack([*honest, byzantine]).norm(dim=1)))
            clipped = torch.stack([v * min(1.0, 1.5 * middle / float(v.norm())) for v in honest])
            assert (moved - clipped.sum(0) / 20).norm() <= 1.5 * middle / 20 * (1 + 1e-6)
    alike = honest / honest.norm(dim=1, keepdim=True)  # none is longer: the mean, to the bit
    assert torch.equal(FedAvg(robust="clip").combine(list(alike), p[:19]), FedAvg().combine(alike, p[:19]))


@given(st.integers(5, 25), st.integers(0, 1000), st.floats(1, 1e20))
@settings(max_examples=40, deadline=None)
def test_no_minority_moves_a_coordinate_out_of_the_honest_range(honest: int, seed: int, size: float) -> None:
    draws = torch.Generator().manual_seed(seed)
    good = torch.randn(honest, 3, generator=draws, dtype=torch.float64)
    bad = size * torch.randn((honest - 1) // 4, 3, generator=draws, dtype=torch.float64)
    everybody = [*good, *bad]
    for how in ("median", "trimmed"):
        result = combine(how, everybody, 0.2)
        assert bool((result <= good.amax(0)).all())
        assert bool((result >= good.amin(0)).all())


def test_trimming_nothing_is_the_mean_and_half_the_median() -> None:
    values = torch.randn(7, 2).double()
    assert torch.allclose(trimmed_mean(values, 0.0), values.mean(0))
    assert torch.allclose(trimmed_mean(values, 0.49), median(values))
    assert float(median(torch.tensor([4.0, 1.0]))) == 2.5


# -- Rows -------------------------------------------------------------------------------------------------------------


def test_long_rows_are_scaled_to_the_bound() -> None:
    task, (client,) = small_task(), small_clients(9)
    J = task.jacobian(task.like, client.x)
    long = J.scaled(torch.tensor([1.0] * 8 + [50.0]))
    clipped, count = clip_rows(long, 2.0)
    assert count == 1
    norms = clipped.dense().flatten(1).norm(dim=1)
    assert float(norms[8]) == pytest.approx(2 * float(median(long.dense().flatten(1).norm(dim=1))))
    assert torch.allclose(clipped.dense()[8] / norms[8], J.dense()[8] / J.dense()[8].norm())
    assert clip_rows(J, 100.0) == (J, 0)


def two_classes(wrong: list[int], turned: list[int], **options: Any) -> tuple[ntkfl.Evolution, Tensor]:
    """Forty rows of two clear classes, and their labels; some have the other's, some their Jacobian turned round."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2).double()
    y = torch.arange(40) % 2
    x = torch.randn(40, 2).double() * 0.2 + torch.where(y == 0, -2.0, 2.0).unsqueeze(1)
    y[wrong] = 1 - y[wrong]
    factors = torch.ones(40)
    factors[turned] = -1
    return ntkfl.evolve(ntkfl.jacobian(model, x).scaled(factors), model(x).detach(), y, **options), y


def test_rows_at_odds_with_the_others_are_left_out_and_no_others() -> None:
    kept = without_outliers(*two_classes([4, 7], [11]), 0.2, None)
    assert sorted({*range(40)} - {*kept.tolist()}) == [4, 7, 11]
    assert len(without_outliers(*two_classes([4, 7], [11]), 0.05, None)) == 38  # no more than asked for
    assert len(without_outliers(*two_classes([], []), 0.2, None)) == 40


def test_a_client_at_odds_with_the_others_is_left_out_whole() -> None:
    senders = torch.arange(40) // 8
    wrong = list(range(8, 16))  # all of client 1
    evolution, y = two_classes(wrong, [], steps=(1e3, 4e3, 2e4))
    kept = without_outliers(evolution, y, 0.2, senders)
    assert torch.equal(senders[kept].unique(), torch.tensor([0, 2, 3, 4]))
    assert len(kept) == 32
    assert len(without_outliers(evolution, y, 0.1, senders)) == 40  # a tenth of five is nobody


def test_rows_of_a_label_that_nobody_else_has_stay() -> None:
    """Four clients have label 0 and one has label 1 alone, as where every client has one label: its rows, which the
    others' pull against, stay, though not where a second client has label 1. A label of one row saves that row only.
    """
    evolution, _ = two_classes(list(range(8, 16)), [], steps=(1e3, 4e3, 2e4))
    senders = torch.arange(40) // 8  # the second resists most, as the test above has it
    alone, shared = (torch.isin(senders, torch.tensor(of)).long() for of in ([1], [1, 3]))
    assert len(without_outliers(evolution, alone, 0.2, senders)) == 40
    one = (torch.arange(40) == 11).long()
    assert without_outliers(evolution, one, 0.2, senders).tolist() == [*range(8), 11, *range(16, 40)]
    assert senders[without_outliers(evolution, shared, 0.2, senders)].unique().tolist() == [0, 2, 3, 4]


def test_rows_that_the_network_does_not_give_are_told_from_true_ones() -> None:
    task, (client,) = small_task(dtype=torch.float32), small_clients(8, dtype=torch.float32)
    J, f0 = task.jacobian(task.like, client.x), task.predict(task.like, client.x)
    assert bool(true_rows(task, task.like, J, f0).all())
    flipped = J.scaled(torch.tensor([1.0, -1.0] + [1.0] * 6))
    assert true_rows(task, task.like, flipped, f0).tolist() == [True, False] + [True] * 6
    other = f0.clone()
    other[5] += 0.1
    assert true_rows(task, task.like, J, other).tolist() == [True] * 5 + [False] + [True] * 2
    assert not bool(true_rows(task, task.like, task.jacobian(task.like, client.x, "dense"), f0).any())
    assert not bool(true_rows(task, task.like + 0.1, J, f0).any())  # of other weights than those sent


# -- Rows that are not what they should be -----------------------------------------------------------------------------


def test_rows_turned_round_are_against_their_own_label_however_long_they_are() -> None:
    task, (client,) = small_task(), small_clients(60)
    client.x[:, :3] += 3 * torch.eye(3).double()[client.y]
    J = task.jacobian(task.like, client.x)
    assert not bool(opposed(J, client.y).any())
    turned = torch.zeros(60, dtype=torch.bool)
    turned[[3, 17, 44]] = True
    for scale in (0.1, 1.0, 1.5):
        assert torch.equal(opposed(J.scaled(torch.where(turned, -scale, 1.0)), client.y), turned)
    half = torch.where(torch.arange(60) % 2 == 0, -1.0, 1.0)
    assert not bool(opposed(J.scaled(half), client.y).any())  # nobody can say which half is corrupted


def test_whether_rows_hold_the_inputs_is_told_by_the_network() -> None:
    x = torch.randn(4, 64)
    for model, verdict in (
        (ntkfl.models.mlp(64, 8, 3), True),
        (torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(64, 3)), False),  # another function of the inputs
        (torch.nn.Sequential(torch.nn.Unflatten(1, (1, 8, 8)), torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(),
                             torch.nn.Linear(72, 3)), False),
    ):  # fmt: skip
        task = Task(model, 3, "ce")
        assert verifiable(task, task.like, task.jacobian(task.like, x)) == verdict
