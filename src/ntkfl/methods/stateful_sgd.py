"""Local training of models that behave otherwise in training than in evaluation: batch normalisation, dropout.

Padding and batching over clients would change what such layers see, so clients train one after the other, plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ntkfl.errors import ModelError
from ntkfl.methods.base import ClientRound, Task
from ntkfl.methods.batchnorm import statistics
from ntkfl.tangent.losses import per_sample
from ntkfl.tangent.parameters import call_with, unflatten

Adjustment = Callable[[Tensor, Tensor], Tensor]  # (gradients [M, d], weights [M, d]) -> gradients to descend


class LocalResult(NamedTuple):
    """Weights after local training [M, d], and the mean loss met on the way [M]."""

    weights: Tensor
    losses: Tensor


def differs_in_training(model: nn.Module) -> bool:
    return any(isinstance(m, _BatchNorm) or (isinstance(m, _DropoutNd) and m.p > 0) for m in model.modules())


def train_in_training_mode(
    task: Task,
    start: Tensor,
    clients: Sequence[ClientRound],
    steps: Sequence[int],
    lr: float,
    batch_size: int,
    adjust: Adjustment | None,
) -> LocalResult:
    """As `train_locally`, in training mode. Each client's running statistics end up in `client.statistics`.

    What is dropped out follows the client's randomness through torch's generator: it repeats, and is no secret.
    """
    flags = [(module, module.training) for module in task.model.modules()]
    weights, losses = start.expand(len(clients), -1).clone(), start.new_zeros(len(clients))
    task.model.train()
    try:
        for i, client in enumerate(clients):
            devices = [start.device] if start.device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(client.randomness.seed("dropout"))
                alone = None if adjust is None else _share(adjust, i, weights)
                losses[i] = _descend(task, weights[i], client, steps[i], lr, batch_size, alone)
    finally:
        for module, flag in flags:
            module.training = flag
    return LocalResult(weights, losses)


def _descend(
    task: Task,
    w: Tensor,
    client: ClientRound,
    steps: int,
    lr: float,
    batch_size: int,
    adjust: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Steps on w [d], in place; the mean loss met."""
    running = {name: value.clone() for name, value in statistics(task.model).items()}
    Y, total = task.training_targets(client.y), w.new_zeros(())
    for rows in batch_order(client, steps, batch_size).to(w.device):
        leaf = w.detach().clone().requires_grad_()
        with torch.enable_grad():
            try:
                f = call_with(task.model, unflatten(task.model, leaf) | running, client.x[rows])
            except ValueError as error:
                raise ModelError(f"client {client.id} cannot train this model: {error}; use group norm") from None
            loss = per_sample(task.loss, f, Y[rows]).mean()
            (gradient,) = torch.autograd.grad(loss, leaf)
        w -= lr * (gradient if adjust is None else adjust(gradient))
        total += loss.detach()
    if running:
        client.statistics = torch.cat([value.reshape(-1) for value in running.values()])
    return total / max(steps, 1)


def _share(adjust: Adjustment, i: int, weights: Tensor) -> Callable[[Tensor], Tensor]:
    """The i-th client's share of an adjustment written for all of them."""
    count = len(weights)
    return lambda g: adjust(g.expand(count, -1), weights[i].expand(count, -1))[i]


def batch_order(client: ClientRound, steps: int, batch_size: int) -> Tensor:
    """Rows for each step, [steps, b], epoch after epoch of the client's own permutations."""
    n, b = len(client), min(len(client), batch_size)
    per_epoch = n // b
    orders = torch.from_numpy(client.randomness.orders("batches", -(-steps // per_epoch), n))
    return orders[:, : per_epoch * b].reshape(-1, b)[:steps]
