"""The same figures as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ntkfl.atomic import replacing
from ntkfl_experiments.bench.rows import BenchRow
from ntkfl_experiments.bench.table import duration, times

_OURS, _OTHERS = "#1b6ca8", "#b8c4cc"


def chart(path: Path, suites: Mapping[str, Sequence[BenchRow]]) -> None:
    """A panel a suite, a bar a row, ours in colour; times on a logarithmic scale."""
    heights = [len(rows) for rows in suites.values()]
    figure = Figure(figsize=(9, 0.9 + sum(0.38 * h + 0.75 for h in heights)), layout="constrained")
    panels = figure.subplots(len(suites), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (name, rows) in zip(panels, suites.items(), strict=True):
        seconds = [row.seconds for row in rows]
        bars = panel.barh(
            range(len(rows)),
            seconds,
            color=[_OURS if row.ours or row.ratio == 1.0 else _OTHERS for row in rows],
            height=0.7,
        )
        panel.bar_label(bars, [_label(row) for row in rows], padding=4, fontsize=8)
        panel.set_yticks(range(len(rows)), [row.what for row in rows], fontsize=8)
        panel.invert_yaxis()
        panel.set_xscale("log")
        panel.set_xlim(min(seconds) / 2, max(seconds) * 12)  # room for the labels
        panel.set_title(name, loc="left", fontsize=10, fontweight="bold")
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds")
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:] or "png", dpi=150)


def _label(row: BenchRow) -> str:
    time = duration(row.seconds)
    return time if row.ratio in (None, 1.0) else f"{time}  ({times(row.ratio)})"
