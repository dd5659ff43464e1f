"""Accuracy curves of a comparison as PNG: against rounds, against bytes and against seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ntkfl.atomic import replacing
from ntkfl.compare.results import Row

# Distinguishable with any common colour blindness, in print and on screen (Okabe and Ito's set).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B", "#7F7F7F", "#BCBD22")
LINES = ("-", "--", ":", "-.")  # the next style once the colours are used up


def plot_curves(rows: Sequence[Row], title: str, targets: Sequence[float], path: Path) -> Path:
    """Three panels side by side; the line is the mean over seeds, the band runs from the lowest to the highest.

    A seed whose run failed is left out.
    """
    columns = min(4, max(1, len(rows)))
    figure = Figure(figsize=(15.0, 4.35 + 0.22 * math.ceil(len(rows) / columns)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    devices = ", ".join(sorted({device for row in rows for device in row.devices}))
    for axis, label in zip(panels, ("communication rounds", "MiB up and down", f"seconds ({devices})"), strict=True):
        for i, row in enumerate(rows):
            _curve(axis, row, label, COLOURS[i % len(COLOURS)], LINES[i // len(COLOURS) % len(LINES)])
        for target in targets:
            axis.axhline(target, color="#999999", linewidth=0.8, linestyle=":")
        axis.set_xlabel(label)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xscale("log")
    panels[0].set_ylabel("test accuracy")
    panels[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    floor = min((min(curve) for row in rows for curve in row.accuracy if curve), default=0.0)
    panels[0].set_ylim(bottom=max(0.0, floor - 0.02))
    figure.suptitle(title)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:] or "png", dpi=130)
    return path


def _curve(axis: Axes, row: Row, label: str, colour: str, line: str) -> None:
    """One method's accuracy against what the axis is labelled with."""
    curves = row.finished(row.accuracy)
    shortest = min((len(curve) for curve in curves), default=0)
    if not shortest:
        return
    across = list(zip(*(curve[:shortest] for curve in curves), strict=True))
    if label.startswith("MiB"):
        ways = zip(row.uplink_mib, row.downlink_mib, strict=True)
        source = [[a + b for a, b in zip(up, down, strict=True)] for up, down in ways]
    elif label.startswith("seconds"):
        source = row.seconds
    else:
        source = [[float(i + 1) for i in range(len(curve))] for curve in row.accuracy]
    x = [statistics.mean(values) for values in zip(*(s[:shortest] for s in row.finished(source)), strict=True)]
    mean, marker = [statistics.mean(values) for values in across], "o" if shortest < 4 else None
    axis.plot(x, mean, line, color=colour, linewidth=1.8, label=row.label, marker=marker)
    if len(curves) > 1:
        axis.fill_between(x, [min(v) for v in across], [max(v) for v in across], color=colour, alpha=0.15, linewidth=0)
