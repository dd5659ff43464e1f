"""Groups of clients that share a computation."""

from __future__ import annotations

import torch

from ntkfl.methods.batching import alike, in_order, joined
from ntkfl.wire import Message
from tests.methods.rounds import small_clients


def test_a_single_part_is_not_copied() -> None:
    x = torch.ones(2)
    assert joined([x]) is x
    assert joined([x, x]).tolist() == [1, 1, 1, 1]


def test_clients_of_one_size_are_together_and_replies_in_the_order_of_all() -> None:
    clients = small_clients(3, 5, 3, 3, 5)
    groups = alike(clients, lambda client: {3: 2, 5: 0}[len(client)])
    assert [[c.id for c in group] for group in groups] == [[0, 2], [3], [1], [4]]
    answered = [(group, [Message("losses", c.id, {}) for c in group]) for group in groups]
    assert [reply.round for reply in in_order(clients, answered)] == [0, 1, 2, 3, 4]
