"""How time and memory of a server update grow with the samples of a round: full kernel, matrix-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ntkfl_experiments.bench.memory import update_peak
from ntkfl_experiments.bench.rows import BenchRow, Setting

# Samples, and where their rows are.
_CPU = [
    (1_000, "memory"),
    (4_000, "memory"),
    (16_000, "memory"),
    (64_000, "memory"),
    (100_000, "memory"),
    (100_000, "file"),
]
_QUICK = [(60, "memory"), (240, "memory"), (240, "file")]
_TOLD = {
    "memory": "beside the data",
    "file": "beside the data, pages of the file not counted: rows in a file",
}


def scaling(setting: Setting) -> list[BenchRow]:
    """A server update against the samples of a round, each size in a process of its own."""
    side, hidden = (14, 16) if setting.quick else (28, 100)
    cases = _QUICK if setting.quick else _CPU
    rows = []
    for N, store in cases:
        one = update_peak(N, side, hidden, setting.device, store)
        product = 4.0 * N * (side * side * hidden + hidden * 10)
        note = f"{one['products']:.0f} products; {one['added'] / 1e9:.2f} GB {_TOLD[store]}"
        what = f"N = {N:,}" if store == "memory" else f"N = {N:,}, out of core"
        rows.append(BenchRow(what, one["seconds"], flop=product * one["products"], note=note, details=one, ours=True))
    # What does not grow, some megabytes and milliseconds, hides the slope at the smallest.
    kept = [i for i, (_, store) in enumerate(cases) if store == "memory"][-4:]
    large = [cases[i][0] for i in kept]
    names = ("seconds", "added", "per_product")
    growth = {name: slope(large, [rows[i].details[name] for i in kept]) for name in names}
    told = f"log-log slopes from N = {large[0]:,}: time {growth['seconds']:.2f}, memory {growth['added']:.2f}"
    last = rows[kept[-1]]
    details = last.details | {f"slope_{name}": value for name, value in growth.items()}
    rows[kept[-1]] = replace(last, note=f"{last.note}; {told}", details=details)
    return rows


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of the power law y = c·xᵖ that fits best, by least squares of the logarithms."""
    u, v = [math.log(a) for a in x], [math.log(max(b, 1e-300)) for b in y]
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    return sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v, strict=True)) / sum((a - mean_u) ** 2 for a in u)
