"""Accuracy against rounds: Figures 3, 4 and 7."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ntkfl.compare.results import Row
from ntkfl.compare.search import Searches
from ntkfl.compare.spec import Entry
from ntkfl.federation.config import DataConfig
from ntkfl.report import COLOURS, LINES
from ntkfl_experiments.paper import settings as setup
from ntkfl_experiments.paper.curves import judge_figure3, judge_five, level, primed
from ntkfl_experiments.paper.item import Context, Item, ItemResult
from ntkfl_experiments.paper.settings import CENTRAL, CHOICES, FEDAVG, NOVA, OURS, PAPER, SHARE


def figure3(context: Context) -> ItemResult:
    """What subsampling (β = 0.4) and projecting (d1' = 100) cost NTK-FL and FedAvg."""
    name, data, notes = setup.available(context, *setup.fashion(0.1))
    reduced = {"subsample_rate": 0.4, "projected_dim": 16 if data.dataset == "digits" else 100}
    entries = [
        member
        for label in (PAPER, OURS, FEDAVG)
        for member in (setup.entry(label, context), setup.entry(primed(label), context, like=label, privacy=reduced))
    ]
    choices = [*CHOICES, "α = 0.1, 100 rounds and unscaled accuracies: the paper gives neither α nor numbers", *notes]
    return _outcome(context, "Figure 3: subsampling and projection", name, data, entries, choices)


def five_methods(
    context: Context,
    title: str,
    name: str,
    data: DataConfig,
    choices: Sequence[str] = (),
    weighting: str = "uniform",
) -> ItemResult:
    """Centralised, NTK-FL (the paper's and ours), DataShare, FedNova and FedAvg on one set of clients."""
    name, data, notes = setup.available(context, name, data)
    entries = [setup.entry(label, context) for label in (CENTRAL, PAPER, OURS)]
    entries += [setup.entry(label, context, weighting=weighting) for label in (SHARE, NOVA, FEDAVG)]
    rounds = f"{12 if context.quick else 100} rounds: the paper gives no number"
    return _outcome(context, title, name, data, entries, [*CHOICES, rounds, *choices, *notes])


def _outcome(
    context: Context, title: str, name: str, data: DataConfig, entries: list[Entry], choices: list[str]
) -> ItemResult:
    rounds, seeds = (12, 1) if context.quick else (100, 5)
    rows, searches = context.compare(setup.comparison(name, context, data, entries, rounds=rounds, seeds=seeds))
    curves = kept(rows, searches)
    figure = Figure(figsize=(8.5, 5.2), layout="constrained")
    draw_curves(figure.subplots(), curves)
    split = f"α = {data.alpha:g}" if data.partition == "dirichlet" else f"by {data.partition}"
    clients = f"{data.dataset}, {data.clients} clients ({split})"
    figure.suptitle(f"{title}\n{clients}, mean and range of {seeds} seed{'s' if seeds > 1 else ''}", fontsize=11)
    settings = {"data": data.model_dump(), "clients_per_round": 20, "rounds": rounds, "network": "d1-100-10 perceptron"}
    return ItemResult(settings, rows[0].seeds, {"curves": curves}, figure, choices)


def kept(rows: Sequence[Row], searches: Searches) -> list[dict[str, Any]]:
    """Rows as they go into the result: four digits of every seed's accuracy at every round."""
    return [
        {
            "label": row.label,
            "setting": row.setting,
            "searched": {name: sorted(own) for name, own in searches[row.label].entry.grid.items()},
            "at_edge": searches[row.label].at_edge,
            "accuracy": [[round(a, 4) for a in curve] for curve in row.accuracy],
            "steps": row.steps if any(t is not None for seed in row.steps for t in seed) else None,
            "uplink_mib": [round(sent[-1], 2) for sent in row.uplink_mib if sent],
            "seconds": [round(s[-1], 1) for s in row.seconds if s],
            "devices": row.devices,
            "failed": [why for why in row.failed if why],
        }
        for row in rows
    ]


def draw_curves(axis: Axes, curves: Sequence[Mapping[str, Any]]) -> None:
    """The mean over seeds of each method's accuracy, and a band from the lowest to the highest."""
    for i, curve in enumerate(curves):
        across = list(zip(*curve["accuracy"], strict=False))  # up to the shortest
        x, colour = range(1, len(across) + 1), COLOURS[i % len(COLOURS)]
        means = [statistics.mean(v) for v in across]
        axis.plot(x, means, LINES[i % 2], color=colour, label=curve["label"], linewidth=1.7)
        if len(curve["accuracy"]) > 1:
            axis.fill_between(x, [min(v) for v in across], [max(v) for v in across], color=colour, alpha=0.12, lw=0)
    ends = sorted(level(curve) for curve in curves)
    axis.set_ylim(max(0.0, ends[0] - 0.25), min(1.0, ends[-1] + 0.03))
    axis.set_xlabel("communication rounds")
    finish(axis, loc="lower right", ncols=2)


def finish(axis: Axes, **legend: Any) -> None:
    """An axis of test accuracies."""
    axis.set_ylabel(axis.get_ylabel() or "test accuracy")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, **legend)


def _five(item: str, about: str, title: str, name: str, data: DataConfig, **more: Any) -> Item:
    return Item(item, about, partial(five_methods, title=title, name=name, data=data, **more), judge_five)


FIGURE3 = Item("fig3", "what subsampling and projection cost NTK-FL and FedAvg (Fashion-MNIST)", figure3, judge_figure3)
FIGURE4A = _five(
    "fig4a",
    "accuracy by round on FEMNIST, by writer",
    "Figure 4a: FEMNIST digits, one writer a client",
    "femnist-writers",
    DataConfig(dataset="femnist", partition="writer", clients=300),
    choices=[
        "other writers than the paper's: 300 writers with at least 16 training digits of those to be had",
        "clients count by their samples in every average, as they do in NTK-FL's kernel",
    ],
    weighting="samples",
)
FIGURE4B = _five(
    "fig4b",
    "accuracy by round on MNIST, α = 0.5",
    "Figure 4b: MNIST",
    "mnist-0.5",
    DataConfig(dataset="mnist", clients=300, alpha=0.5),
)
FIGURE4C = _five(
    "fig4c", "accuracy by round on Fashion-MNIST, α = 0.5", "Figure 4c: Fashion-MNIST", *setup.fashion(0.5)
)
FIGURE7 = _five(
    "fig7",
    "accuracy by round on CIFAR-10, α = 0.1",
    "Figure 7: CIFAR-10, the 3072-100-10 network",
    "cifar10-0.1",
    DataConfig(dataset="cifar10", clients=300, alpha=0.1),
)
