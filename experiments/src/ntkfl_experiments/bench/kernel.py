"""The trace kernel of a client's or a cohort's samples: from factors, against from the dense Jacobian."""

from __future__ import annotations

import torch

from ntkfl.models import mlp
from ntkfl.tangent import jacobian
from ntkfl_experiments.bench.dense import DenseWay
from ntkfl_experiments.bench.inputs import synthetic
from ntkfl_experiments.bench.race import race, relative
from ntkfl_experiments.bench.rows import BenchRow, Setting


def kernel(setting: Setting) -> list[BenchRow]:
    """Trace kernel from factors, and from the dense Jacobian."""
    N, side, hidden = (40, 14, 16) if setting.quick else (1000, 28, 100)
    x = synthetic(N, side)[0].to(setting.device)
    torch.manual_seed(0)
    model = mlp(side * side, hidden, 10).to(setting.device)
    J = jacobian(model, x)
    dense = DenseWay(model, x, 10)
    timed = race(
        {
            "factors": lambda: jacobian(model, x),
            "ours": J.kernel,
            "dense": dense.fill,
            "products": dense.kernel,
        },
        turns=3,
        setting=setting,
    )
    factors, ours, filling, products = (timed[name].seconds for name in ("factors", "ours", "dense", "products"))
    difference = relative(timed["ours"].result, timed["products"].result)
    # A layer from n to m: Gram matrices of inputs and of sensitivities without what these have in common, n + m numbers
    # per row.
    thin = 2.0 * N**2 * (side * side + hidden + hidden + 10)
    thick = 2.0 * N**2 * 10 * dense.weights
    goal = None if setting.quick else 300.0
    return [
        BenchRow(
            "kernel alone, from factors",
            ours,
            1.0,
            flop=thin,
            note=f"N={N:,}, {side * side}-{hidden}-10; {J.nbytes / 1e6:,.1f} MB",
        ),
        BenchRow(
            "kernel alone, from the dense Jacobian",
            products,
            products / ours,
            goal,
            thick,
            difference,
            f"{dense.gigabytes:,.2g} GB Jacobian",
        ),
        BenchRow("Jacobian and kernel, factors", factors + ours, 1.0, note=f"Jacobian {factors * 1e3:,.3g} ms"),
        BenchRow(
            "Jacobian and kernel, dense",
            filling + products,
            (filling + products) / (factors + ours),
            goal,
            difference=difference,
            note=f"Jacobian {filling:,.2g} s, made {dense.chunk} rows at a time",
        ),
    ]
