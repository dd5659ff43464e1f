"""Jacobian and trace kernel of networks other than the perceptron: the forms chosen layer by layer, against dense."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ntkfl.models import cnn, mlp
from ntkfl.tangent import jacobian, plan_jacobian
from ntkfl_experiments.bench.inputs import synthetic
from ntkfl_experiments.bench.race import race, relative
from ntkfl_experiments.bench.rows import BenchRow, Setting

_CLIENT = 200  # samples


def networks(setting: Setting) -> list[BenchRow]:
    """Jacobian and kernel of a small CNN, by the forms chosen, and dense; Jacobians beside gradients."""
    N, side = (12, 14) if setting.quick else (500, 28)
    x = synthetic(N, side)[0].to(setting.device).reshape(N, 1, side, side)
    torch.manual_seed(0)
    model = cnn((1, side, side), 10).to(setting.device)
    timed = race(
        {
            "ours": lambda: jacobian(model, x).kernel(),
            "dense": lambda: jacobian(model, x, form="dense").kernel(),
        },
        turns=3,
        setting=setting,
    )
    ours, dense = timed["ours"], timed["dense"]
    own, all_of_it = (jacobian(model, x, form=form).nbytes for form in ("auto", "dense"))
    return [
        BenchRow("CNN: Jacobian and kernel", ours.seconds, 1.0, note=f"N={N:,}; Jacobian {own / 1e6:,.3g} MB"),
        BenchRow(
            "CNN: the same, dense",
            dense.seconds,
            dense.seconds / ours.seconds,
            difference=relative(ours.result, dense.result),
            note=f"Jacobian {all_of_it / 1e6:,.4g} MB, {all_of_it / own:,.3g} times as large",
            details={"memory_ratio": all_of_it / own},
        ),
        *_beside_a_gradient("MLP", mlp(side * side, 100, 10), x[:_CLIENT].flatten(1), setting),
        *_beside_a_gradient("CNN", model, x[:_CLIENT], setting),
    ]


def _beside_a_gradient(name: str, model: nn.Module, x: Tensor, setting: Setting) -> list[BenchRow]:
    """A client's Jacobian, with a plan made once, and the gradient of its loss: what its training takes per step.

    On a CPU in processor time over all threads, which other work on the machine hardly changes.
    """
    model = model.to(setting.device)
    plan, y = plan_jacobian(model, x), torch.arange(len(x), device=x.device) % 10
    parameters = list(model.parameters())
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
