"""Groups of clients that share a computation."""

from __future__ import annotations

import pytest
import torch

from ntkfl.methods.batching import in_groups, joined
from tests.methods.rounds import small_clients


@pytest.mark.parametrize(
    ("rows", "expected"), [(0, [[0], [1], [2], [3]]), (5, [[0, 1], [2], [3]]), (99, [[0, 1, 2, 3]])]
)
def test_groups_keep_the_order_and_about_the_size(rows: int, expected: list[list[int]]) -> None:
    assert [[c.id for c in group] for group in in_groups(small_clients(2, 3, 9, 1), rows)] == expected


def test_a_single_part_is_not_copied() -> None:
    x = torch.ones(2)
    assert joined([x]) is x
    assert joined([x, x]).tolist() == [1, 1, 1, 1]
