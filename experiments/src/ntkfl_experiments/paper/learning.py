"""Accuracy against rounds: Figures 3, 4 and 7."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ntkfl.compare.results import Row
from ntkfl.compare.run import Searches
from ntkfl.federation.config import DataConfig
from ntkfl.report.curves import COLOURS, LINES
from ntkfl_experiments.paper.curves import judge_figure3, judge_five, level, primed
from ntkfl_experiments.paper.item import Context, Item, ItemResult
from ntkfl_experiments.paper.settings import (
    CENTRAL,
    CHOICES,
    FEDAVG,
    NOVA,
    OURS,
    PAPER,
    QUICK_CHOICE,
    SHARE,
    available,
    comparison,
    entry,
    fashion,
)


def figure3(context: Context) -> ItemResult:
    """What subsampling (β = 0.4) and projecting (d1' = 100) cost NTK-FL and FedAvg."""
    reduced: dict[str, Any] = {"subsample_rate": 0.4, "projected_dim": 100}
    name, data, notes = available(context, *fashion(0.1))
    rounds, seeds = (12, 1) if context.quick else (100, 5)
    if data.dataset == "digits":
        reduced["projected_dim"] = 16
    entries = [
        member
        for label in (PAPER, OURS, FEDAVG)
        for member in (entry(label, context), entry(primed(label), context, like=label, privacy=reduced))
    ]
    with context.pool() as pool:
        rows, searches = context.compare(comparison(name, context, data, entries, rounds=rounds, seeds=seeds), pool)
    choices = [*CHOICES, "α = 0.1, 100 rounds and unscaled accuracies: the paper gives neither α nor numbers", *notes]
    return _outcome(context, "Figure 3: subsampling and projection", rows, searches, data, rounds, choices)


def five_methods(
    context: Context, title: str, name: str, data: DataConfig, choices: Sequence[str], weighting: str = "uniform"
) -> ItemResult:
    """Centralised, NTK-FL (the paper's and ours), DataShare, FedNova and FedAvg on one set of clients."""
    rounds, seeds = (12, 1) if context.quick else (100, 5)
    name, data, notes = available(context, name, data)
    entries = [entry(label, context) for label in (CENTRAL, PAPER, OURS)]
    entries += [entry(label, context, weighting=weighting) for label in (SHARE, NOVA, FEDAVG)]
    with context.pool() as pool:
        rows, searches = context.compare(comparison(name, context, data, entries, rounds=rounds, seeds=seeds), pool)
    said = [*CHOICES, f"{rounds} rounds: the paper gives no number", *choices, *notes]
    return _outcome(context, title, rows, searches, data, rounds, said)


def _outcome(
    context: Context, title: str, rows: Sequence[Row], searches: Searches, data: DataConfig, rounds: int,
    choices: list[str],
) -> ItemResult:  # fmt: skip
    figure = Figure(figsize=(8.5, 5.2), layout="constrained")
    draw_rows(figure.subplots(), rows)
    figure.suptitle(f"{title}\n{described(data, rows)}", fontsize=11)
    settings = {"data": data.model_dump(), "clients_per_round": 20, "rounds": rounds, "network": "d1-100-10 perceptron"}
    said = [*choices, QUICK_CHOICE] if context.quick else choices
    return ItemResult(settings, rows[0].seeds, {"curves": kept(rows, searches)}, figure, said)


def described(data: DataConfig, rows: Sequence[Row]) -> str:
    split = f"α = {data.alpha:g}" if data.partition == "dirichlet" else f"by {data.partition}"
    seeds = len(rows[0].seeds)
    return f"{data.dataset}, {data.clients} clients ({split}), mean and range of {seeds} seed{'s' if seeds > 1 else ''}"


def kept(rows: Sequence[Row], searches: Searches) -> list[dict[str, Any]]:
    """Rows as they go into the result: four digits of every seed's accuracy at every round."""
    return [
        {
            "label": row.label,
            "setting": row.setting,
            "searched": searches[row.label]["searched"],
            "at_edge": searches[row.label]["still_at_edge"],
            "accuracy": [[round(a, 4) for a in curve] for curve in row.accuracy],
            "steps": row.steps if any(t is not None for seed in row.steps for t in seed) else None,
            "uplink_mib": [round(sent[-1], 2) for sent in row.uplink_mib if sent],
            "seconds": [round(s[-1], 1) for s in row.seconds if s],
            "devices": row.devices,
            "failed": [why for why in row.failed if why],
        }
        for row in rows
    ]


def draw_rows(axis: Axes, rows: Sequence[Row]) -> None:
    """The mean over seeds, and a band from the lowest to the highest."""
    for i, row in enumerate(rows):
        shortest = min(len(curve) for curve in row.accuracy)
        across = list(zip(*(curve[:shortest] for curve in row.accuracy), strict=True))
        x, colour = range(1, shortest + 1), COLOURS[i % len(COLOURS)]
        axis.plot(x, [statistics.mean(v) for v in across], LINES[i % 2], color=colour, label=row.label, linewidth=1.7)
        if len(row.accuracy) > 1:
            axis.fill_between(x, [min(v) for v in across], [max(v) for v in across], color=colour, alpha=0.12, lw=0)
    ends = sorted(level({"accuracy": row.accuracy}) for row in rows)
    axis.set_ylim(max(0.0, ends[0] - 0.25), min(1.0, ends[-1] + 0.03))
    axis.set_xlabel("communication rounds")
    axis.set_ylabel("test accuracy")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right", ncols=2)


def figure4a(context: Context) -> ItemResult:
    data = DataConfig(dataset="femnist", partition="writer", clients=300)
    return five_methods(
        context, "Figure 4a: FEMNIST digits, one writer a client", "femnist-writers", data,
        ["other writers than the paper's: 300 writers with at least 16 training digits of those to be had",
         "clients count by their samples in every average, as they do in NTK-FL's kernel"],
        weighting="samples",
    )  # fmt: skip


def figure4b(context: Context) -> ItemResult:
    data = DataConfig(dataset="mnist", clients=300, alpha=0.5)
    return five_methods(context, "Figure 4b: MNIST", "mnist-0.5", data, [])


def figure4c(context: Context) -> ItemResult:
    return five_methods(context, "Figure 4c: Fashion-MNIST", *fashion(0.5), [])


def figure7(context: Context) -> ItemResult:
    data = DataConfig(dataset="cifar10", clients=300, alpha=0.1)
    return five_methods(context, "Figure 7: CIFAR-10, the 3072-100-10 network", "cifar10-0.1", data, [])


ITEMS = (
    Item("fig3", "what subsampling and projection cost NTK-FL and FedAvg (Fashion-MNIST)", figure3, judge_figure3),
    Item("fig4a", "accuracy by round on FEMNIST, by writer", figure4a, judge_five),
    Item("fig4b", "accuracy by round on MNIST, α = 0.5", figure4b, judge_five),
    Item("fig4c", "accuracy by round on Fashion-MNIST, α = 0.5", figure4c, judge_five),
    Item("fig7", "accuracy by round on CIFAR-10, α = 0.1", figure7, judge_five),
)
