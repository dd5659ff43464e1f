"""Local training of a round's clients as one batched computation: stacked weights, masked batches, one vmap.

Clients differ in how many samples they hold, so batches are padded to one size and padding is weighted zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from ntkfl.methods.base import ClientRound, Task
from ntkfl.methods.gram_sgd import Stacked, first_layer, pays, shaped, train_in_span
from ntkfl.methods.stateful_sgd import Adjustment, LocalResult, batch_order, differs_in_training, train_in_training_mode
from ntkfl.tangent.cuda_graph import recordable, repeated
from ntkfl.tangent.losses import AnyLoss, per_sample
from ntkfl.tangent.parameters import call_with, column_slices, evaluating, trainable


def train_locally(
    task: Task,
    start: Tensor,
    clients: Sequence[ClientRound],
    steps: int | Sequence[int],
    lr: float,
    batch_size: int,
    adjust: Adjustment | None = None,
    batched: bool = True,
) -> LocalResult:
    """`steps` steps of stochastic gradient descent by each client from `start` [d] (or its own start, [M, d]).

    Batches are drawn without replacement, epoch after epoch, from each client's own randomness; a client with no more
    samples than `batch_size` uses all of them at each step. Where `steps` differ between clients, one that is done
    stays where it is. `adjust` changes gradients before the step (FedProx, SCAFFOLD).
    `batched=False` runs the same numbers a client at a time: the reference, and the way for models vmap cannot batch.
    """
    counts = [steps] * len(clients) if isinstance(steps, int) else list(steps)
    if differs_in_training(task.model):
        return train_in_training_mode(task, start, clients, counts, lr, batch_size, adjust)
    if not batched and len(clients) > 1:
        starts = start.expand(len(clients), -1)
        singles = [
            train_locally(task, starts[i], [c], counts[i], lr, batch_size, _alone(adjust, i, len(clients)), False)
            for i, c in enumerate(clients)
        ]
        return LocalResult(torch.cat([s.weights for s in singles]), torch.cat([s.losses for s in singles]))
    if max(counts) == 0:
        return LocalResult(start.expand(len(clients), -1).clone(), start.new_zeros(len(clients)))
    ends = torch.tensor(counts, device=start.device)
    rates = [lr if min(counts) > step else lr * (ends > step).to(start.dtype) for step in range(max(counts))]
    stacked = _stack(task, start.expand(len(clients), -1))
    longest = max(len(c) for c in clients)
    with evaluating(task.model):
        layer = first_layer(task.model) if batched and adjust is None and longest <= batch_size else None
        if layer is not None and pays(layer, longest, max(counts)):
            x, Y, mask, _ = _batches(task, clients, 1, batch_size)
            losses = train_in_span(layer, _masked_loss(task.loss), stacked, x, Y, mask, rates)
        else:
            losses = _descend(task, stacked, _batches(task, clients, max(counts), batch_size), rates, adjust, batched)
    taken = torch.stack([ends > step for step in range(max(counts))])  # [steps, M]
    return LocalResult(_flat(stacked), (losses * taken).sum(0) / ends.clamp(min=1))


class Batches(NamedTuple):
    """All samples of M clients, padded to the longest, and those of each step; None: all of them at each step."""

    x: Tensor  # [M, n, ...]
    Y: Tensor  # [M, n, d2]
    mask: Tensor  # [M, B], of a step's samples: 1 where there is one
    order: Tensor | None  # [steps, M, B], rows of x


def _descend(
    task: Task,
    stacked: Stacked,
    batches: Batches,
    rates: Sequence[float | Tensor],
    adjust: Adjustment | None,
    batched: bool,
) -> Tensor:
    """Steps on the stacked parameters, in place; the loss at each step and client, [steps, M]."""
    loss_of = _masked_loss(task.loss)

    def loss(parameters: dict[str, Tensor], x: Tensor, Y: Tensor, mask: Tensor) -> Tensor:
        return loss_of(call_with(task.model, parameters, x), Y, mask)

    one = grad_and_value(loss)
    gradient = vmap(one, randomness="different") if batched else _unbatched(one)
    x, Y, mask, order = batches
    # Every step finds its rate and its samples in these tensors, so that it can be recorded and replayed.
    varying = any(isinstance(rate, Tensor) for rate in rates)
    rate = torch.zeros_like(mask[:, 0]) if varying else rates[0]
    chosen = None if order is None else order[0].clone()
    rows = torch.arange(len(x), device=x.device).unsqueeze(1)
    met = torch.zeros_like(mask[:, 0])

    def step() -> None:
        some = (x, Y) if chosen is None else (x[rows, chosen], Y[rows, chosen])
        gradients, losses = gradient(stacked, *some, mask)
        if adjust is not None:
            gradients = _stack(task, adjust(_flat(gradients), _flat(stacked)))
        for name, g in gradients.items():
            stacked[name].sub_(g * shaped(rate, g))
        met.copy_(losses)

    take = repeated(step, len(rates) if recordable(task.model) else 1, x.device)
    losses = met.new_zeros(len(rates), len(met))
    for i, size in enumerate(rates):
        if isinstance(rate, Tensor):
            rate.copy_(size) if isinstance(size, Tensor) else rate.fill_(size)
        if order is not None and chosen is not None:
            chosen.copy_(order[i])
        take()
        losses[i] = met
    return losses


def _stack(task: Task, weights: Tensor) -> Stacked:
    """Weights [M, d] by parameter, [M, *shape] each: derivatives by parameter are never padded to [M, d]."""
    parameters = trainable(task.model)
    return {
        name: weights[:, s].reshape(len(weights), *parameters[name].shape).clone(memory_format=torch.contiguous_format)
        for name, s in column_slices(parameters).items()
    }


def _flat(stacked: Stacked) -> Tensor:
    return torch.cat([p.flatten(1) for p in stacked.values()], dim=1)


def _masked_loss(loss: AnyLoss) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The mean loss over the rows that are there."""

    def value(f: Tensor, Y: Tensor, mask: Tensor) -> Tensor:
        return (per_sample(loss, f, Y) * mask).sum() / mask.sum()

    return value


def _alone(adjust: Adjustment | None, i: int, clients: int) -> Adjustment | None:
    """The i-th client's share of an adjustment written for all of them."""
    if adjust is None:
        return None
    every = adjust
    return lambda g, w: every(g.expand(clients, -1), w.expand(clients, -1))[i : i + 1]


def _unbatched(one: Callable[..., tuple[Stacked, Tensor]]) -> Callable[..., tuple[Stacked, Tensor]]:
    """`one` for a stack of a single client, without vmap."""

    def gradient(stacked: Stacked, *batch: Tensor) -> tuple[Stacked, Tensor]:
        g, loss = one({name: p[0] for name, p in stacked.items()}, *(a[0] for a in batch))
        return {name: p.unsqueeze(0) for name, p in g.items()}, loss.unsqueeze(0)

    return gradient


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
