"""Clients of a round that share a computation in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ntkfl.methods.base import ClientRound, Task
from ntkfl.wire import Message


def batched(task: Task) -> bool:
    """Whether rows of many clients are computed on at once: on a CPU those of one already fill its caches."""
    return task.like.device.type == "cuda"


def joined(parts: list[Tensor]) -> Tensor:
    """Rows of all parts; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def alike(clients: Sequence[ClientRound], most: Callable[[ClientRound], int]) -> list[list[ClientRound]]:
    """Clients with as many samples each, `most` of one of them together; one at least."""
    groups: list[list[ClientRound]] = []
    for same in _by_size(clients).values():
        few = max(1, most(same[0]))
        groups += [same[at : at + few] for at in range(0, len(same), few)]
    return groups


def in_order(
    clients: Sequence[ClientRound], answered: Iterable[tuple[Sequence[ClientRound], Sequence[Message]]]
) -> list[Message]:
    """The replies of groups of clients in the order of all clients."""
    replies = {id(client): own for some, each in answered for client, own in zip(some, each, strict=True)}
    return [replies[id(client)] for client in clients]


def _by_size(clients: Sequence[ClientRound]) -> dict[int, list[ClientRound]]:
    found: dict[int, list[ClientRound]] = {}
    for client in clients:
        found.setdefault(len(client), []).append(client)
    return found
