"""A client's work: its Jacobian in factors, beside local training."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ntkfl.models import mlp
from ntkfl.tangent import jacobian, plan_jacobian
from ntkfl_experiments.bench.timing import BenchRow, Setting, fashion, race, synthetic

_LR = 0.1
_BATCH = 20


def clients(setting: Setting) -> list[BenchRow]:
    """A client's Jacobian, and a local epoch beside it."""
    n, side, hidden = (12, 14, 16) if setting.quick else (200, 28, 100)
    x, y = synthetic(n, side) if setting.quick else fashion(n)[:2]
    x, y = x.to(setting.device), y.to(setting.device)
    torch.manual_seed(0)
    model = mlp(side * side, hidden, 10).to(setting.device)
    plan = plan_jacobian(model, x)
    timed = race(
        {
            "factors": lambda: jacobian(model, x, plan=plan),
            "step": lambda: _epoch(model, x, y, n),
            "epoch": lambda: _epoch(model, x, y, _BATCH),
        },
        turns=7,
        setting=setting,
    )
    factors, step, epoch = (timing.seconds for timing in timed.values())
    return [
        BenchRow("Jacobian factors of a client", factors, 1.0, note=f"{n} samples, {side * side}-{hidden}-10"),
        BenchRow("a local epoch of it, one batch of all", step, step / factors),
        BenchRow(f"a local epoch in batches of {_BATCH}", epoch, epoch / factors),
    ]


def _epoch(model: nn.Module, x: Tensor, y: Tensor, batch: int) -> None:
    """Local training as it is usually written, on a copy of the network."""
    net = copy.deepcopy(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=_LR)
    for inputs, labels in zip(torch.split(x, batch), torch.split(y, batch), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
