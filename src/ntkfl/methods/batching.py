"""Clients of a round that share a computation in this process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ntkfl.methods.base import ClientRound


def in_groups(clients: Sequence[ClientRound], rows: int) -> list[list[ClientRound]]:
    """Clients in their order, in groups of about `rows` rows; one at least."""
    groups: list[list[ClientRound]] = []
    held = rows
    for client in clients:
        if held >= rows or held + len(client) > 2 * rows:
            groups.append([])
            held = 0
        groups[-1].append(client)
        held += len(client)
    return groups


def joined(parts: list[Tensor]) -> Tensor:
    """Rows of all parts; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
