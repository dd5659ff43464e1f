"""Local training of a round's clients as one batched computation: stacked weights, masked batches, one vmap.

Clients differ in how many samples they hold, so batches are padded to one size and padding is weighted zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from ntkfl.methods.base import Client, Task
from ntkfl.tangent.losses import per_sample, targets
from ntkfl.tangent.parameters import evaluating, unflatten

Adjustment = Callable[[Tensor, Tensor], Tensor]  # (gradients [M, d], weights [M, d]) -> gradients to descend


class LocalResult(NamedTuple):
    """Weights after local training [M, d], and the mean loss met on the way [M]."""

    weights: Tensor
    losses: Tensor


def train_locally(
    task: Task,
    start: Tensor,
    clients: Sequence[Client],
    steps: int | Sequence[int],
    lr: float,
    batch_size: int,
    adjust: Adjustment | None = None,
    batched: bool = True,
) -> LocalResult:
    """`steps` steps of stochastic gradient descent by each client from `start` [d] (or its own start, [M, d]).

    Batches are drawn without replacement, epoch after epoch, from each client's own seed; a client with no more samples
    than `batch_size` uses all of them at each step. Where `steps` differ between clients, one that is done stays where
    it is. `adjust` changes gradients before the step (FedProx, SCAFFOLD).
    `batched=False` runs the same numbers a client at a time: the reference, and the way for models vmap cannot batch.
    """
    counts = [steps] * len(clients) if isinstance(steps, int) else list(steps)
    if not batched and len(clients) > 1:
        starts = start.expand(len(clients), -1)
        singles = [
            train_locally(task, starts[i], [c], counts[i], lr, batch_size, _alone(adjust, i, len(clients)), False)
            for i, c in enumerate(clients)
        ]
        return LocalResult(torch.cat([s.weights for s in singles]), torch.cat([s.losses for s in singles]))
    weights = start.expand(len(clients), -1).clone()
    total = torch.zeros(len(clients), dtype=weights.dtype, device=weights.device)
    ends = torch.tensor(counts, device=weights.device)
    one = grad_and_value(_loss(task))
    gradient = vmap(one, randomness="different") if batched else _unbatched(one)
    with evaluating(task.model):
        for step, (x, Y, mask) in enumerate(_batches(task, clients, max(counts), batch_size)):
            gradients, losses = gradient(weights, x, Y, mask)
            if adjust is not None:
                gradients = adjust(gradients, weights)
            going = ends > step
            weights = torch.where(going.unsqueeze(1), weights - lr * gradients, weights)
            total = torch.where(going, total + losses, total)
    return LocalResult(weights, total / ends.clamp(min=1))


def _alone(adjust: Adjustment | None, i: int, clients: int) -> Adjustment | None:
    """The i-th client's share of an adjustment written for all of them."""
    if adjust is None:
        return None
    every = adjust
    return lambda g, w: every(g.expand(clients, -1), w.expand(clients, -1))[i : i + 1]


def _unbatched(one: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`one` for a stack of a single client, without vmap."""

    def gradient(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        g, loss = one(*(a[0] for a in arguments))
        return g.unsqueeze(0), loss.unsqueeze(0)

    return gradient


def _loss(task: Task) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def loss(weights: Tensor, x: Tensor, Y: Tensor, mask: Tensor) -> Tensor:
        f = functional_call(task.model, unflatten(task.model, weights), (x,))
        return (per_sample(task.loss, f, Y) * mask).sum() / mask.sum()

    return loss


def _batches(
    task: Task, clients: Sequence[Client], steps: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """x [M, B, ...], targets [M, B, d2] and mask [M, B] for each step."""
    width = min(batch_size, max(len(c) for c in clients))
    longest = max(len(c) for c in clients)
    like = task.like
    x = torch.stack([_padded(c.x, longest) for c in clients])
    Y = torch.stack([_padded(targets(c.y, task.outputs, task.loss, like.dtype), longest) for c in clients])
    if longest <= batch_size:  # every client uses all it has, at every step
        mask = torch.stack([(torch.arange(longest, device=like.device) < len(c)).to(like.dtype) for c in clients])
        for _ in range(steps):
            yield x, Y, mask
        return
    orders = [_order(c, steps, batch_size) for c in clients]
    mask = torch.stack([(torch.arange(width) < min(len(c), batch_size)).to(like.dtype) for c in clients]).to(
        like.device
    )
    rows = torch.arange(len(clients), device=like.device).unsqueeze(1)
    for step in range(steps):
        index = torch.stack([_fit(order[step], width) for order in orders]).to(like.device)
        yield x[rows, index], Y[rows, index], mask


def _order(client: Client, steps: int, batch_size: int) -> Tensor:
    """Rows for each step, [steps, b], epoch after epoch of the client's own permutations."""
    n, b = len(client), min(len(client), batch_size)
    generator = torch.Generator().manual_seed(client.seed)
    per_epoch = n // b
    epochs = [
        torch.randperm(n, generator=generator)[: per_epoch * b].view(per_epoch, b)
        for _ in range(-(-steps // per_epoch))
    ]
    return torch.cat(epochs)[:steps] if epochs else torch.empty(0, b, dtype=torch.int64)


def _fit(index: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(index, (0, width - len(index)))


def _padded(rows: Tensor, length: int) -> Tensor:
    if len(rows) == length:
        return rows
    return torch.cat([rows, rows.new_zeros((length - len(rows), *rows.shape[1:]))])
