"""The trace kernel of a cohort's samples: from a layer's factors, against from the dense Jacobian."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ntkfl.models import cnn, mlp
from ntkfl.tangent import jacobian, plan_jacobian
from ntkfl_experiments.bench.dense import DenseWay
from ntkfl_experiments.bench.timing import BenchRow, Setting, race, relative, synthetic


def kernel(setting: Setting) -> list[BenchRow]:
    """Jacobian and trace kernel by the forms chosen, and dense; Jacobians beside gradients."""
    N, side, hidden = (40, 14, 16) if setting.quick else (1000, 28, 100)
    x = synthetic(N, side)[0].to(setting.device)
    torch.manual_seed(0)
    images, network = x[: N // 2].view(-1, 1, side, side), cnn((1, side, side), 10).to(setting.device)
    model = mlp(side * side, hidden, 10).to(setting.device)
    return [
        *_perceptron(model, x, setting),
        *_convolutional(network, images, setting),
        *_beside_a_gradient("MLP", model, x[: N // 5], setting),
        *_beside_a_gradient("CNN", network, images[: N // 5], setting),
    ]


def _perceptron(model: nn.Module, x: Tensor, setting: Setting) -> list[BenchRow]:
    """The kernel alone, and with the Jacobian it is made of."""
    J, dense = jacobian(model, x), DenseWay(model, x, 10)
    ways = {"factors": lambda: jacobian(model, x), "ours": J.kernel, "dense": dense.fill, "products": dense.kernel}
    timed = race(ways, turns=3, setting=setting)
    factors, ours, filling, products = (timed[name].seconds for name in ways)
    apart = relative(timed["ours"].result, timed["products"].result)
    return [
        BenchRow("kernel alone, from factors", ours, 1.0, note=f"N={len(x):,}; {J.nbytes / 1e6:,.1f} MB"),
        BenchRow(
            "kernel alone, from the dense Jacobian",
            products,
            products / ours,
            apart,
            f"{dense.gigabytes:,.2g} GB Jacobian",
        ),
        BenchRow("Jacobian and kernel, factors", factors + ours, 1.0, note=f"Jacobian {factors * 1e3:,.3g} ms"),
        BenchRow(
            "Jacobian and kernel, dense",
            filling + products,
            (filling + products) / (factors + ours),
            apart,
            f"Jacobian {filling:,.2g} s, made {dense.chunk} rows at a time",
        ),
    ]


def _convolutional(model: nn.Module, x: Tensor, setting: Setting) -> list[BenchRow]:
    ways = {form: lambda form=form: jacobian(model, x, form=form).kernel() for form in ("auto", "dense")}
    ours, dense = race(ways, turns=3, setting=setting).values()
    own, whole = (jacobian(model, x, form=form).nbytes for form in ("auto", "dense"))
    return [
        BenchRow("CNN: Jacobian and kernel", ours.seconds, 1.0, note=f"N={len(x):,}; Jacobian {own / 1e6:,.3g} MB"),
        BenchRow(
            "CNN: the same, dense",
            dense.seconds,
            dense.seconds / ours.seconds,
            relative(ours.result, dense.result),
            f"Jacobian {whole / 1e6:,.4g} MB, {whole / own:,.3g} times as large",
        ),
    ]


def _beside_a_gradient(name: str, model: nn.Module, x: Tensor, setting: Setting) -> list[BenchRow]:
    """A client's Jacobian, with a plan made once, and the gradient of its loss: what its training takes per step.

    On a CPU in processor time over all threads, which other work on the machine hardly changes.
    """
    plan, parameters = plan_jacobian(model, x), list(model.parameters())
    y = torch.arange(len(x), device=x.device) % 10
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
