"""One product with the full kernel, R ↦ J Jᵀ R, against float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ntkfl.models import mlp
from ntkfl.tangent import jacobian
from ntkfl_experiments.bench.inputs import fashion, synthetic
from ntkfl_experiments.bench.race import race, relative
from ntkfl_experiments.bench.rows import BenchRow, Setting


def products(setting: Setting) -> list[BenchRow]:
    """A kernel product in float32 and in float64."""
    N, side, hidden = (60, 4, 8) if setting.quick else (4000, 28, 100)
    x, _, called = (*synthetic(N, side), "synthetic images") if setting.quick else fashion(N)
    torch.manual_seed(0)
    J = jacobian(mlp(side**2, hidden, 10).to(setting.device), x.to(setting.device))
    R = torch.randn(N, 10, generator=torch.Generator().manual_seed(0)).to(setting.device)
    exact = J.double()
    ways: dict[str, Callable[[], Tensor]] = {
        "ours, float32": lambda: J.product(R),
        "float64": lambda: exact.product(R.double()),
    }
    timed = race(ways, 5, setting)
    ours, true = timed["ours, float32"].seconds, timed["float64"].result
    flop = 4.0 * N * hidden * (side**2 + 10)
    notes = {"ours, float32": f"N={N:,} {called}, {side**2}-{hidden}-10; differences are from float64"}
    return [
        BenchRow(
            name,
            timing.seconds,
            timing.seconds / ours,
            flop=flop,
            difference=None if name == "float64" else relative(timing.result, true),
            note=notes.get(name, ""),
        )
        for name, timing in timed.items()
    ]
