"""Figures of the analysis, drawn alike, and the cells they show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ntkfl.report import COLOURS
from ntkfl_experiments.paper.analysis import Cell

BLUE, ORANGE, GREEN, PINK, YELLOW, BLACK = *COLOURS[:4], "#e69f00", "#000000"


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of ln y against ln x, by least squares: the exponent of a power law."""
    return statistics.linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope


def medians(runs: Sequence[Sequence[float]]) -> list[float]:
    """The median over runs, place by place."""
    return [statistics.median(values) for values in zip(*runs, strict=True)]


def pick(cells: Sequence[Cell], **wanted: Any) -> list[Cell]:
    """The cells whose keys have these values."""
    return [cell for cell in cells if all(cell[name] == value for name, value in wanted.items())]


def values(cells: Sequence[Cell], name: str) -> list[Any]:
    """What the cells have under a name, each once, in order."""
    return sorted({cell[name] for cell in cells})


def panels(count: int, title: str) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels side by side."""
    figure = Figure(figsize=(6 * count, 5.2), layout="constrained")
    figure.suptitle(title)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def finish(axis: Axes, title: str, x: str, y: str, logx: bool = True, logy: bool = True) -> None:
    """Labels, grid, and the legend below, where no curve is."""
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    if logx:
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        if high < 200 * low:  # a short axis has too few powers of ten
            axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.xaxis.set_minor_formatter(NullFormatter())
    if logy:
        axis.set_yscale("log")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))


def curve(axis: Axes, x: Sequence[float], y: Sequence[float], style: str, colour: str, label: str) -> None:
    """One line, with small marks where the style has some."""
    axis.plot(x, y, style, color=colour, label=label, markersize=4)


def band(axis: Axes, x: Sequence[float], runs: Sequence[Sequence[float]], colour: str, label: str) -> None:
    """The median over runs, and the range from the lowest to the highest."""
    axis.plot(x, medians(runs), color=colour, label=label, linewidth=1.8, marker="o", markersize=3)
    if len(runs) > 1:
        across = list(zip(*runs, strict=True))
        axis.fill_between(x, [min(v) for v in across], [max(v) for v in across], color=colour, alpha=0.18, linewidth=0)
