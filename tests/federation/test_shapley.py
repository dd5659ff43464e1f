"""Shapley values are those of their definition, bounded whatever a client holds."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from ntkfl.federation.shapley import shapley_values
from ntkfl.tangent.ridge import RidgeSums, total
from tests.federation.test_shares import CLASSES, F, samples


def shares(count: int) -> dict[int, RidgeSums]:
    found = {}
    for c in range(count):
        x, y = samples(6 + 2 * c, c)
        found[c] = RidgeSums.of(x.double(), nn.functional.one_hot(y, CLASSES))
    return found


def worth(parts: list[RidgeSums], whole: RidgeSums, penalty: float) -> float:
    """By the definition: the penalty of all clients, and never below that of no model."""
    if not parts:
        return 0.0
    sums = total(parts)
    mean, middle = sums.gram[-1, :-1] / sums.samples, whole.gram[-1, :-1] / whole.samples
    S = sums.gram[:-1, :-1] - sums.samples * torch.outer(mean, mean)
    scale = float(whole.gram.diagonal()[:-1].sum() - whole.samples * middle.square().sum()) / F  # N s
    W = torch.linalg.solve(
        S + penalty * scale * torch.eye(F, dtype=S.dtype), sums.cross[:-1] - torch.outer(mean, sums.cross[-1])
    )
    solved = torch.cat([W, (sums.cross[-1] / sums.samples - mean @ W).unsqueeze(0)])
    return max(0.0, 1 - float(whole.error(solved) / whole.squares))


def test_exact_values_are_means_over_all_orders() -> None:
    parts, penalty = shares(4), 0.01
    whole = total(list(parts.values()))
    expected = dict.fromkeys(parts, 0.0)
    for order in itertools.permutations(parts):
        for place, client in enumerate(order):
            before = [parts[c] for c in order[:place]]
            gain = worth([*before, parts[client]], whole, penalty) - worth(before, whole, penalty)
            expected[client] += gain / math.factorial(4)
    found = shapley_values(parts, penalty)
    assert [v.value for v in found] == pytest.approx(list(expected.values()), abs=1e-12)
    assert sum(v.value for v in found) == pytest.approx(worth(list(parts.values()), whole, penalty), abs=1e-12)
    assert all(v.error == 0 for v in found)


def test_values_are_bounded_whatever_a_client_holds() -> None:
    """Two samples that hardly differ and yet have different labels: fitted alone, weights of 10⁶."""
    parts = shares(3)
    x = torch.zeros(2, F, dtype=torch.float64)
    x[1, 0] = 1e-6
    parts[3] = RidgeSums.of(x, nn.functional.one_hot(torch.tensor([0, 1]), CLASSES))
    parts[4] = RidgeSums.of(x[:1], nn.functional.one_hot(torch.tensor([2]), CLASSES))
    for penalty in (1e-6, 1e-2, 1.0):
        found = shapley_values(parts, penalty)
        assert all(-1 <= v.value <= 1 for v in found)
        whole = worth(list(parts.values()), total(list(parts.values())), penalty)
        assert sum(v.value for v in found) == pytest.approx(whole, abs=1e-9)
        assert {v.client: v.value for v in found}[3] < 0.1  # what two samples can tell
        # A sample alone says its class of everybody, which is worse than saying nothing: worth 0, and not less.
        pair = {0: parts[2], 1: parts[4]}
        both, big = (worth(some, total(list(pair.values())), penalty) for some in (list(pair.values()), [parts[2]]))
        assert shapley_values(pair, penalty)[1].value == pytest.approx((both - big) / 2, abs=1e-9)


def test_equal_clients_are_worth_the_same() -> None:
    parts = shares(3)
    parts[3] = parts[1]
    found = {v.client: v.value for v in shapley_values(parts, 0.01)}
    assert found[1] == pytest.approx(found[3], abs=1e-12)


def test_sampled_values_agree_within_their_error_bars() -> None:
    parts = shares(5)
    exact = shapley_values(parts, 0.01)
    sampled = shapley_values(parts, 0.01, exact=3, permutations=300)
    for one, other in zip(exact, sampled, strict=True):
        assert 0 < other.error < 0.05
        assert abs(one.value - other.value) < 5 * other.error
