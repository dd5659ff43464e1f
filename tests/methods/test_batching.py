"""Clients that share a computation answer as each would alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ntkfl.methods import NTKFL, ClientRound, Task
from ntkfl.methods.batching import in_groups, joined
from ntkfl.methods.step_selection import scores
from ntkfl.privacy.randomness import Randomness


def clients(*sizes: int) -> list[ClientRound]:
    torch.manual_seed(0)
    return [
        ClientRound(i, torch.randn(n, 6, dtype=torch.float64), torch.randint(3, (n,)), Randomness.simulated(i))
        for i, n in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("rows", "expected"), [(0, [[0], [1], [2], [3]]), (5, [[0, 1], [2], [3]]), (99, [[0, 1, 2, 3]])]
)
def test_groups_keep_the_order_and_about_the_size(rows: int, expected: list[list[int]]) -> None:
    assert [[c.id for c in group] for group in in_groups(clients(2, 3, 9, 1), rows)] == expected


def test_a_single_part_is_not_copied() -> None:
    x = torch.ones(2)
    assert joined([x]) is x
    assert joined([x, x]).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("method", [NTKFL(), NTKFL(sparsity=0.5), NTKFL(shuffle=True)])
def test_clients_together_send_what_each_sends_alone(method: NTKFL) -> None:
    """What an accelerator does with a round's clients, on the CPU."""
    task = Task(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double(), 3, "ce")
    some, w = clients(2, 5, 3), task.like
    candidates = torch.stack([w, w + 0.1, w - 0.2])
    for together, alone in (
        (method.upload_together(task, 1, w, some), [method.upload_together(task, 1, w, [c])[0] for c in some]),
        (
            scores(task, 1, candidates, some, method.shuffle),
            [scores(task, 1, candidates, [c], method.shuffle)[0] for c in some],
        ),
    ):
        for ours, theirs in zip(together, alone, strict=True):
            assert list(ours.arrays) == list(theirs.arrays)
            for name, array in ours.arrays.items():
                torch.testing.assert_close(array, theirs.arrays[name], rtol=1e-12, atol=1e-14)
