"""Accuracy curves of a comparison as PNG: against rounds, against bytes and against seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from ntkfl.atomic import replacing
from ntkfl.compare.results import Row
from ntkfl.report import COLOURS, LINES


def plot_curves(rows: Sequence[Row], title: str, targets: Sequence[float], path: Path) -> Path:
    """Three panels side by side; the line is the mean over seeds, the band runs from the lowest to the highest.

    A seed whose run failed is left out.
    """
    columns = min(4, max(1, len(rows)))
    # As wide as a README shows it at 80 dots an inch: text of 10 points stays readable there.
    figure = Figure(figsize=(11.0, 3.9 + 0.2 * math.ceil(len(rows) / columns)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    devices = ", ".join(sorted({device for row in rows for device in row.devices}))
    for i, row in enumerate(rows):
        colour, line = COLOURS[i % len(COLOURS)], LINES[i // len(COLOURS) % len(LINES)]
        rounds = [[i + 1.0 for i in range(len(curve))] for curve in row.accuracy]
        ways = zip(row.uplink_mib, row.downlink_mib, strict=True)
        sent = [[a + b for a, b in zip(up, down, strict=True)] for up, down in ways]
        for axis, x in zip(panels, (rounds, sent, row.seconds), strict=True):
            _curve(axis, row, x, colour, line)
    for axis, label in zip(panels, ("communication rounds", "MiB up and down", f"seconds ({devices})"), strict=True):
        for target in targets:
            axis.axhline(target, color="#777777", linewidth=0.8, linestyle=":")
        axis.set_xlabel(label)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        _logarithmic(axis)
    panels[0].set_ylabel("test accuracy")
    panels[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    floor = min((min(curve) for row in rows for curve in row.accuracy if curve), default=0.0)
    panels[0].set_ylim(bottom=max(0.0, floor - 0.02))
    figure.suptitle(title, fontsize=10, wrap=True)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:] or "png", dpi=170)
    return path


def _curve(axis: Axes, row: Row, x: list[list[float]], colour: str, line: str) -> None:
    """One method's accuracy against `x`, which has a list per seed and a number per round, as the accuracy has."""
    # Shape [rounds of the shortest run, seeds]: a mean is over all seeds or it is not drawn.
    accuracy, places = ([*zip(*row.finished(curves))] for curves in (row.accuracy, x))  # noqa: B905
    if not accuracy:
        return
    means, mean = ([statistics.mean(values) for values in rounds] for rounds in (places, accuracy))
    marker = "o" if len(accuracy) < 4 else None
    axis.plot(means, mean, line, color=colour, linewidth=1.8, label=row.label, marker=marker)
    low, high = ([end(values) for values in accuracy] for end in (min, max))
    axis.fill_between(means, low, high, color=colour, alpha=0.15, linewidth=0)


def _logarithmic(axis: Axes) -> None:
    """A logarithmic x-axis with plain numbers: 1, 2, 5 of each power of ten, or powers alone where there are many."""
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 200 * low else (1.0,)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
