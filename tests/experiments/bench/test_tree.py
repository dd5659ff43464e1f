"""A tree of aggregators: everybody is added once, one at a time, and the server cannot tell."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from ntkfl_experiments.bench.tree import FAN, climb, through_a_tree, trained_with

from ntkfl.wire import Message


@pytest.mark.parametrize("clients", [1, 2, FAN, FAN + 1, 10 * FAN, 234])
def test_every_client_is_added_once_and_no_level_holds_more_than_a_total(clients: int) -> None:
    asked: list[int] = []
    held = [0, 0]  # replies that were asked for and not yet added, now and at most

    def ask(i: int) -> Message:
        asked.append(i)
        held[0] += 1
        held[1] = max(held)
        return Message("update", 1, {"mask": torch.tensor(1 << (i % 60)), "count": torch.tensor(1)})

    def add(replies: Iterable[Message]) -> Message:
        mask, count, children = 0, 0, 0
        for reply in replies:
            held[0] -= 1
            mask, count = mask | int(reply.arrays["mask"]), count + int(reply.arrays["count"])
            children += 1
        assert children <= FAN
        held[0] += 1
        return Message("update", 1, {"mask": torch.tensor(mask), "count": torch.tensor(count)})

    total = climb(range(clients), ask, add)
    assert asked == list(range(clients))
    assert int(total.arrays["count"]) == clients
    assert held == [1, 1]


def test_a_round_by_a_tree_and_one_by_train_send_the_same_bytes() -> None:
    torch.manual_seed(0)
    x, y = torch.rand(2000, 16), torch.randint(10, (2000,))
    model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.ReLU(), torch.nn.Linear(4, 10))
    through, trained = (way(model, x, y, 12, torch.device("cpu")) for way in (through_a_tree, trained_with))
    assert through["reply"] == trained["reply"]
    assert through["depth"] == 2
    assert 0 < through["adding"] < through["seconds"]
