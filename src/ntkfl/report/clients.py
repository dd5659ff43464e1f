"""Who has what: clients × classes as bubbles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ntkfl.atomic import replacing
from ntkfl.errors import ConfigError

_CELL = 0.27  # inches between neighbouring clients and between neighbouring classes
_FILL = 0.92  # of a cell, for the largest bubble
_LETTER, _LONGEST = 0.075, 18  # inches of a name's letter, and how many are shown
_COLOUR = "#3d7ea6"
_FORMATS = (".png", ".pdf", ".svg")


def bubble_plot(
    counts: NDArray[np.int64],
    path: str | Path,
    title: str,
    shown: int = 40,
    names: Sequence[str] = (),
    class_names: Sequence[str] = (),
) -> Path:
    """Draw counts [clients, classes] to `path`: a bubble's area is in proportion to its count.

    At most `shown` clients are drawn, the first ones, so that bubbles stay legible; by `names` where there are some.
    """
    path = Path(path)
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"{path}: a plot is written as {', '.join(_FORMATS)}")
    drawn = counts[:shown]
    clients, classes = drawn.shape
    width, height = max(clients, 16) * _CELL, max(classes, 5) * _CELL  # few clients stand wider apart
    names, class_names = ([_short(name) for name in some] for some in (names[:shown], class_names))
    left, right, bottom, top = 0.65, 1.1, 0.6, 0.55  # inches
    left += _LETTER * max(map(len, class_names), default=0)
    bottom += _LETTER * max(map(len, names), default=0)
    figure = Figure(figsize=(left + width + right, bottom + height + top), dpi=160)
    FigureCanvasAgg(figure)
    total = figure.get_size_inches()
    axes = figure.add_axes((left / total[0], bottom / total[1], width / total[0], height / total[1]))
    draw_bubbles(axes, drawn)
    if names:
        axes.set_xticks(range(clients), names, rotation=90)
    if class_names:
        axes.set_yticks(range(classes), class_names)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=9)
    note = f"client (first {clients} of {len(counts)})" if clients < len(counts) else "client"
    axes.set_xlabel(note, fontsize=9.5, labelpad=5)
    axes.set_ylabel("class", fontsize=9.5)
    try:
        with replacing(path) as file:
            figure.savefig(file, format=path.suffix[1:].lower())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path


def _short(name: str) -> str:
    """For an axis; without what matplotlib would take for mathematics."""
    return (name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…").replace("$", "\\$")


def draw_bubbles(axes: Axes, counts: NDArray[np.int64]) -> None:
    """One bubble where a client has samples of a class, and a legend of three sizes."""
    clients, classes = counts.shape
    largest = max(1, int(counts.max()))
    area = (_CELL * 72 * _FILL) ** 2  # points²: matplotlib's `s` is the square of the diameter
    client, label = np.nonzero(counts)
    axes.scatter(client, label, s=area * counts[client, label] / largest, color=_COLOUR, linewidths=0, zorder=2)
    axes.set_xlim(-0.5, clients - 0.5)
    axes.set_ylim(-0.5, classes - 0.5)
    step = 1 if clients <= 20 else 5
    axes.set_xticks(range(0, clients, step))
    axes.set_yticks(range(classes))
    axes.set_xticks(range(clients), minor=True)
    axes.tick_params(which="both", length=0, labelsize=8.5, colors="#333333")
    axes.grid(which="both", color="#e6e9ec", linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_color("#c3c9ce")
    for count in sorted({largest, max(1, round(largest / 4)), max(1, round(largest / 16))}, reverse=True):
        axes.scatter([], [], s=area * count / largest, color=_COLOUR, linewidths=0, label=f"{count}")
    axes.legend(
        title="samples",
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=8.5,
        title_fontsize=8.5,
        labelspacing=1.1,
        borderaxespad=0.2,
    )
