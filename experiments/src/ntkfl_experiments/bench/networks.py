"""Jacobian and trace kernel of networks other than the perceptron: the forms chosen layer by layer, against dense."""

from __future__ import annotations

import torch

from ntkfl.models import cnn
from ntkfl.tangent import jacobian
from ntkfl_experiments.bench.inputs import synthetic
from ntkfl_experiments.bench.race import race, relative
from ntkfl_experiments.bench.rows import BenchRow, Setting


def networks(setting: Setting) -> list[BenchRow]:
    """Jacobian and kernel of a small convolutional network, by the forms chosen, and dense."""
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
    ]
