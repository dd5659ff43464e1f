"""How time and memory of a server update grow with the samples of a round: full kernel, matrix-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ntkfl_experiments.bench.memory import update_peak
from ntkfl_experiments.bench.rows import BenchRow, Setting

_CPU = [1_000, 4_000, 16_000, 64_000, 100_000]
_QUICK = [60, 240]


def scaling(setting: Setting) -> list[BenchRow]:
    """A server update against the samples of a round, each size in a process of its own."""
    side, hidden = (14, 16) if setting.quick else (28, 100)
    cases = _QUICK if setting.quick else _CPU
    rows = []
    for N in cases:
        one = update_peak(N, side, hidden, setting.device)
        product = 4.0 * N * (side * side * hidden + hidden * 10)
        note = f"{one['products']:.0f} products; {one['added'] / 1e9:.2f} GB beside the data"
        flop = product * one["products"]
        rows.append(BenchRow(f"N = {N:,}", one["seconds"], flop=flop, note=note, details=one, ours=True))
    # What does not grow, some megabytes and milliseconds, hides the slope at the smallest.
    names, large = ("seconds", "added", "per_product"), cases[-4:]
    growth = {name: slope(large, [row.details[name] for row in rows[-4:]]) for name in names}
    told = f"log-log slopes from N = {large[0]:,}: time {growth['seconds']:.2f}, memory {growth['added']:.2f}"
    details = rows[-1].details | {f"slope_{name}": value for name, value in growth.items()}
    rows[-1] = replace(rows[-1], note=f"{rows[-1].note}; {told}", details=details)
    return rows


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of the power law y = c·xᵖ that fits best, by least squares of the logarithms."""
    u, v = [math.log(a) for a in x], [math.log(max(b, 1e-300)) for b in y]
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    return sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v, strict=True)) / sum((a - mean_u) ** 2 for a in u)
