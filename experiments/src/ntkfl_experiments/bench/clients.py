"""A client's work: its Jacobian in factors against local training, ours and as it is usually written."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ntkfl.methods.averaging.local_training import train_locally
from ntkfl.methods.task import ClientRound, Task
from ntkfl.models import mlp
from ntkfl.privacy.randomness import Randomness
from ntkfl.tangent.parameters import flatten
from ntkfl_experiments.bench.inputs import fashion, synthetic
from ntkfl_experiments.bench.race import race, relative
from ntkfl_experiments.bench.rows import BenchRow, Setting

_LR = 0.1
_BATCH = 20


def clients(setting: Setting) -> list[BenchRow]:
    """A client's Jacobian, a local epoch beside it, and local training against torch.optim.SGD."""
    n, steps, side, hidden = (12, 4, 14, 16) if setting.quick else (200, 20, 28, 100)
    x, y = synthetic(n, side) if setting.quick else fashion(n)[:2]
    torch.manual_seed(0)
    model = mlp(side * side, hidden, 10).to(setting.device)
    client = ClientRound(0, x.to(setting.device), y.to(setting.device), Randomness.simulated(0))
    task, start = Task(model, 10, "ce"), flatten(model)
    timed = race(
        {
            "factors": lambda: task.jacobian(start, client.x),
            "step": lambda: _loop(model, client, 1, n),
            "epoch": lambda: _loop(model, client, 1, _BATCH),
            "ours": lambda: train_locally(task, start, client, steps, _LR, n).weights,
            "loop": lambda: _loop(model, client, steps, n),
        },
        turns=7,
        setting=setting,
    )
    seconds = {name: timing.seconds for name, timing in timed.items()}
    # Forward and weight gradients of each layer, and the gradient through the last.
    flop = 2.0 * n * steps * (2 * side * side * hidden + 3 * hidden * 10)
    goal = None if setting.quick else 1.0
    note, apart = f"{steps} steps, {side * side}-{hidden}-10", relative(timed["ours"].result, timed["loop"].result)
    return [
        BenchRow("Jacobian factors of a client", seconds["factors"], 1.0, note=f"{n} samples"),
        BenchRow("a local epoch of it, one batch of all", seconds["step"], seconds["step"] / seconds["factors"], goal),
        BenchRow(
            f"a local epoch in batches of {_BATCH}", seconds["epoch"], seconds["epoch"] / seconds["factors"], goal
        ),
        BenchRow("local training of a client", seconds["ours"], 1.0, flop=flop, note=note),
        BenchRow(
            "the same: a copy, torch.optim.SGD",
            seconds["loop"],
            seconds["loop"] / seconds["ours"],
            flop=flop,
            difference=apart,
        ),
    ]


def _loop(model: nn.Module, client: ClientRound, epochs: int, batch: int) -> Tensor:
    """Local training as it is usually written."""
    net, loss_of = copy.deepcopy(model), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=_LR)
    for _ in range(epochs):
        for x, y in zip(torch.split(client.x, batch), torch.split(client.y, batch), strict=True):
            optimizer.zero_grad()
            loss_of(net(x), y).backward()
            optimizer.step()
    return flatten(net)
