"""A client's work: its Jacobian in factors, beside a gradient of its loss and beside local training."""

from __future__ import annotations

import copy
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ntkfl.models import cnn, mlp
from ntkfl.tangent import jacobian, plan_jacobian
from ntkfl_experiments.bench.timing import BenchRow, Setting, fashion, race, synthetic

_LR = 0.1
_BATCH = 20


def clients(setting: Setting) -> list[BenchRow]:
    """A client's Jacobian in gradients of its loss, and beside a local epoch."""
    n, side, hidden = (12, 14, 16) if setting.quick else (200, 28, 100)
    x, y = synthetic(n, side) if setting.quick else fashion(n)[:2]
    x, y = x.to(setting.device), y.to(setting.device)
    torch.manual_seed(0)
    model, network = (net.to(setting.device) for net in (mlp(side * side, hidden, 10), cnn((1, side, side), 10)))
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
        *_beside_a_gradient("MLP", model, x, y, setting),
        *_beside_a_gradient("CNN", network, x.view(-1, 1, side, side), y, setting),
    ]


def _beside_a_gradient(name: str, model: nn.Module, x: Tensor, y: Tensor, setting: Setting) -> list[BenchRow]:
    """A client's Jacobian, with a plan made once, and the gradient of its loss: what its training takes per step.

    On a CPU in processor time over all threads, which other work on the machine hardly changes.
    """
    plan, parameters = plan_jacobian(model, x), list(model.parameters())
    timed = race(
        {
            "Jacobian": lambda: jacobian(model, x, plan=plan),
            "gradient": lambda: torch.autograd.grad(F.cross_entropy(model(x), y), parameters),
        },
        turns=9,
        setting=setting,
        clock=time.process_time if x.device.type == "cpu" else time.perf_counter,
    )
    ours, gradient = timed["Jacobian"].seconds, timed["gradient"].seconds
    note = f"{ours / gradient:.3g} gradients; N={len(x)}"
    return [
        BenchRow(f"{name}: Jacobian of a client", ours, 1.0, note=note, details={"gradients": ours / gradient}),
        BenchRow(f"{name}: a gradient of the same", gradient, gradient / ours),
    ]


def _epoch(model: nn.Module, x: Tensor, y: Tensor, batch: int) -> None:
    """Local training as it is usually written, on a copy of the network."""
    net = copy.deepcopy(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=_LR)
    for inputs, labels in zip(torch.split(x, batch), torch.split(y, batch), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
