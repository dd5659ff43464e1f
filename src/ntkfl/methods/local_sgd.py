"""Local training of a round's clients as one batched computation: stacked weights, masked batches, one vmap.

Clients differ in how many samples they hold, so batches are padded to one size and padding is weighted zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from ntkfl.methods.base import ClientRound, Task
from ntkfl.methods.stateful_sgd import Adjustment, LocalResult, batch_order, differs_in_training, train_in_training_mode
from ntkfl.tangent.losses import per_sample
from ntkfl.tangent.parameters import call_with, column_slices, evaluating, trainable

_Stacked = dict[str, Tensor]  # parameters of M clients by name, [M, *shape]


def train_locally(
    task: Task,
    start: Tensor,
    clients: Sequence[ClientRound],
    steps: int | Sequence[int],
    lr: float,
    batch_size: int,
    adjust: Adjustment | None = None,
) -> LocalResult:
    """`steps` steps of stochastic gradient descent by each client from `start` [d] (or its own start, [M, d]).

    Batches are drawn without replacement, epoch after epoch, from each client's own randomness; a client with no more
    samples than `batch_size` uses all of them at each step. Where `steps` differ between clients, one that is done
    stays where it is. `adjust` changes gradients before the step (FedProx, SCAFFOLD).
    """
    counts = [steps] * len(clients) if isinstance(steps, int) else list(steps)
    if differs_in_training(task.model):
        return train_in_training_mode(task, start, clients, counts, lr, batch_size, adjust)
    if max(counts) == 0:
        return LocalResult(start.expand(len(clients), -1).clone(), start.new_zeros(len(clients)))
    ends = torch.tensor(counts, device=start.device)
    going = torch.stack([ends > step for step in range(max(counts))])  # [steps, M]
    stacked = _stack(task, start.expand(len(clients), -1))
    with evaluating(task.model):
        batches = _batches(task, clients, max(counts), batch_size)
        losses = _descend(task, stacked, batches, lr * going.to(start.dtype), adjust)
    return LocalResult(_flat(stacked), (losses * going).sum(0) / ends.clamp(min=1))


class Batches(NamedTuple):
    """All samples of M clients, padded to the longest, and those of each step; None: all of them at each step."""

    x: Tensor  # [M, n, ...]
    Y: Tensor  # [M, n, d2]
    mask: Tensor  # [M, B], of a step's samples: 1 where there is one
    order: Tensor | None  # [steps, M, B], rows of x


def _descend(task: Task, stacked: _Stacked, batches: Batches, rates: Tensor, adjust: Adjustment | None) -> Tensor:
    """Steps of sizes `rates` [steps, M] on the stacked parameters, in place; the losses met, [steps, M]."""

    def loss(parameters: _Stacked, x: Tensor, Y: Tensor, mask: Tensor) -> Tensor:
        """The mean over the rows that are there."""
        return (per_sample(task.loss, call_with(task.model, parameters, x), Y) * mask).sum() / mask.sum()

    gradient = vmap(grad_and_value(loss), randomness="different")
    x, Y, mask, order = batches
    rows = torch.arange(len(x), device=x.device).unsqueeze(1)
    met = []
    for step, rate in enumerate(rates):
        some = (x, Y) if order is None else (x[rows, order[step]], Y[rows, order[step]])
        gradients, losses = gradient(stacked, *some, mask)
        if adjust is not None:
            gradients = _stack(task, adjust(_flat(gradients), _flat(stacked)))
        for name, g in gradients.items():
            stacked[name].sub_(g * rate.view(-1, *[1] * (g.ndim - 1)))
        met.append(losses)
    return torch.stack(met)


def _stack(task: Task, weights: Tensor) -> _Stacked:
    """Weights [M, d] by parameter, [M, *shape] each: derivatives by parameter are never padded to [M, d]."""
    parameters = trainable(task.model)
    return {
        name: weights[:, s].reshape(len(weights), *parameters[name].shape).clone(memory_format=torch.contiguous_format)
        for name, s in column_slices(parameters).items()
    }


def _flat(stacked: _Stacked) -> Tensor:
    return torch.cat([p.flatten(1) for p in stacked.values()], dim=1)


def _batches(task: Task, clients: Sequence[ClientRound], steps: int, batch_size: int) -> Batches:
    """The samples of all clients, and which of them each step takes."""
    longest = max(len(c) for c in clients)
    like = task.like
    x = torch.stack([_padded(c.x, longest) for c in clients])
    Y = torch.stack([_padded(task.training_targets(c.y), longest) for c in clients])
    width = min(batch_size, longest)
    held = torch.tensor([min(len(c), batch_size) for c in clients])
    mask = (torch.arange(width) < held.unsqueeze(1)).to(like)
    if longest <= batch_size:  # every client uses all it has, at every step
        return Batches(x, Y, mask, None)
    orders = [batch_order(c, steps, batch_size) for c in clients]
    order = torch.stack([torch.nn.functional.pad(o, (0, width - o.shape[1])) for o in orders], dim=1)
    return Batches(x, Y, mask, order.to(like.device))


def _padded(rows: Tensor, length: int) -> Tensor:
    if len(rows) == length:
        return rows
    return torch.cat([rows, rows.new_zeros((length - len(rows), *rows.shape[1:]))])
