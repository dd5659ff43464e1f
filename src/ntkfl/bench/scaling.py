"""How time and memory of a server update grow with the samples of a round: full kernel, matrix-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ntkfl.bench.inputs import synthetic
from ntkfl.bench.memory import update_peak
from ntkfl.bench.race import race, relative
from ntkfl.bench.rows import Row, Setting
from ntkfl.models import mlp
from ntkfl.tangent import PAPER_STEPS, Evolution, evolve, jacobian
from ntkfl.tangent.jacobian import BlockJacobian, Jacobian
from ntkfl.tangent.stacking import StackedJacobian

_SAMPLES: tuple[int, ...] = (1_000, 4_000, 16_000, 64_000, 100_000)
_PARTS = 8
_QUICK: tuple[int, ...] = (60, 240)


def scaling(setting: Setting) -> list[Row]:
    """A server update against the samples of a round, each size in a process of its own."""
    side, hidden = (14, 16) if setting.quick else (28, 100)
    sizes = _QUICK if setting.quick else _SAMPLES
    met = [update_peak(N, side, hidden, setting.device) for N in sizes]
    rows = []
    for N, one in zip(sizes, met, strict=True):
        product = 4.0 * N * (side * side * hidden + hidden * 10)
        note = f"{one['products']:.0f} products; {one['added'] / 1e9:.2f} GB beside the data"
        rows.append(
            Row(f"N = {N:,}", one["seconds"], flop=product * one["products"], note=note, details=one, ours=True)
        )
    # What does not grow, some megabytes and milliseconds, hides the slope at the smallest.
    large, last = sizes[-4:], met[-4:]
    growth = {name: slope(large, [one[name] for one in last]) for name in ("seconds", "added", "per_product")}
    told = f"log-log slopes from N = {large[0]:,}: time {growth['seconds']:.2f}, memory {growth['added']:.2f}"
    details = rows[-1].details | {f"slope_{name}": value for name, value in growth.items()}
    rows[-1] = replace(rows[-1], note=f"{rows[-1].note}; {told}", details=details)
    return [*rows, *_in_parts(sizes[1], side, hidden, setting)]


def _in_parts(samples: int, side: int, hidden: int, setting: Setting) -> list[Row]:
    """One server, against several that each keep a part of the rows and add up Jᵀr, a vector [d] a product."""
    x, y = (part.to(setting.device) for part in synthetic(samples, side))
    torch.manual_seed(0)
    model = mlp(side * side, hidden, 10).to(setting.device)
    with torch.no_grad():
        f0 = model(x)
    J = jacobian(model, x)
    assert isinstance(J, BlockJacobian)
    shards = StackedJacobian([J[i : i + samples // _PARTS] for i in range(0, samples, samples // _PARTS)])

    def update(of: Jacobian) -> tuple[Evolution, Tensor]:
        evolution = evolve(of, f0, y, 0.01, PAPER_STEPS)
        return evolution, evolution.deltas()

    timed = race({"one": lambda: update(J), "parts": lambda: update(shards)}, 2, setting)
    (whole, changes), (apart, found) = timed["one"].result, timed["parts"].result
    seconds = {name: timing.seconds for name, timing in timed.items()}
    # In every product the parts' sums [d] are added up and given back.
    exchanged = 2.0 * J.dtype.itemsize * J.shape[2] * apart.statistics.evaluations
    return [
        Row(f"N = {samples:,} at one server", seconds["one"], 1.0, note=f"{whole.statistics.evaluations} products"),
        Row(
            f"the same in {_PARTS} parts, in turn",
            seconds["parts"],
            seconds["parts"] / seconds["one"],
            difference=relative(found, changes),
            note=f"each would send and receive {exchanged / 1e6:,.3g} MB",
            details={"exchanged_bytes_a_part": exchanged},
            ours=True,
        ),
    ]


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of the power law y = c·xᵖ that fits best, by least squares of the logarithms."""
    u, v = [math.log(a) for a in x], [math.log(max(b, 1e-300)) for b in y]
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    return sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v, strict=True)) / sum((a - mean_u) ** 2 for a in u)
