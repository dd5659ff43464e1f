"""Groups of clients that share a computation."""

from __future__ import annotations

import pytest

from ntkfl.methods.batching import alike, in_groups, in_order
from ntkfl.wire import Message
from tests.methods.rounds import small_clients


@pytest.mark.parametrize(
    ("rows", "expected"), [(0, [[0], [1], [2], [3]]), (5, [[0, 1], [2], [3]]), (99, [[0, 1, 2, 3]])]
)
def test_groups_keep_the_order_and_about_the_size(rows: int, expected: list[list[int]]) -> None:
    assert [[c.id for c in group] for group in in_groups(small_clients(2, 3, 9, 1), rows)] == expected


def test_clients_of_one_size_are_together_and_replies_in_the_order_of_all() -> None:
    clients = small_clients(3, 5, 3, 3, 5)
    groups = alike(clients, lambda client: {3: 2, 5: 0}[len(client)])
    assert [[c.id for c in group] for group in groups] == [[0, 2], [3], [1], [4]]
    answered = [(group, [Message("losses", c.id, {}) for c in group]) for group in groups]
    assert [reply.round for reply in in_order(clients, answered)] == [0, 1, 2, 3, 4]
