"""Accuracy by round with 20 clients per round, from the figures."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, ScalarFormatter

from ntkfl_experiments.backbone.trials import SEEDS

_METHODS = {
    "ridge, clients seen so far": ("sum-ridge", "#b2182b"),
    "scaffold": ("SCAFFOLD", "#2166ac"),
    "fedadam": ("FedAdam", "#7b3294"),
    "fedavg": ("FedAvg", "#444444"),
    "fedprox": ("FedProx", "#1b7837"),
}


def picture(source: Path, out: Path) -> None:
    """Mean and range of three seeds; rounds on a logarithmic axis."""
    found = json.loads(source.read_text())
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, partition in zip(panels, ("one label per client", "α = 0.1"), strict=True):
        for name, (label, colour) in _METHODS.items():
            curves = [found[f"{name} / {partition} / seed {seed}"]["accuracy"] for seed in SEEDS]
            rounds, values = range(1, len(curves[0]) + 1), list(zip(*curves, strict=True))
            means = [sum(at) / len(at) for at in values]
            axes.plot(rounds, means, color=colour, label=label, linewidth=2 if "ridge" in name else 1.2)
            axes.fill_between(rounds, [min(at) for at in values], [max(at) for at in values], color=colour, alpha=0.12)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([1, 2, 5, 10, 20, 50]))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set(title=partition, xlabel="round (20 of 100 clients)", ylim=(60, 88))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy in percent")
    panels[1].legend(loc="lower right", fontsize=8)
    figure.savefig(out, dpi=80)
