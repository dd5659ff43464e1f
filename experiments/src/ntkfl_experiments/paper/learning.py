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
from ntkfl_experiments.paper.item import Context, Item, ItemResult, Verdict
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

TAIL = 5  # rounds whose mean is a curve's level: single rounds of averaging methods swing by points
CLOSE = 2.0  # points of accuracy that we call close


def figure3(context: Context) -> ItemResult:
    """What subsampling (β = 0.4) and projecting (d1' = 100) cost NTK-FL and FedAvg."""
    reduced: dict[str, Any] = {"subsample_rate": 0.4, "projected_dim": 100}
    name, data, notes = available(context, *fashion(0.1))
    rounds, seeds = (12, 1) if context.quick else (100, 3)
    if data.dataset == "digits":
        reduced["projected_dim"] = 16
    entries = [
        member
        for label in (PAPER, OURS, FEDAVG)
        for member in (entry(label, context), entry(_primed(label), context, like=label, **reduced))
    ]
    with context.pool() as pool:
        rows, searches = context.compare(comparison(name, context, data, entries, rounds=rounds, seeds=seeds), pool)
    at = {row.label: row for row in rows}
    drops = {label: 100 * (level(at[label]) - level(at[_primed(label)])) for label in (PAPER, OURS, FEDAVG)}
    findings = [
        Verdict(
            "the joint effect costs FedAvg more accuracy than NTK-FL",
            "a slight drop in NTK-FL, a nonnegligible one in FedAvg (a figure without numbers)",
            f"points lost at the end of {rounds} rounds: "
            + ", ".join(f"{label} {drop:.1f}" for label, drop in drops.items()),
            drops[PAPER] < drops[FEDAVG],
            f"NTK-FL (ours) loses {'less' if drops[OURS] < drops[FEDAVG] else 'no less'} than FedAvg too",
        )
    ]
    choices = [*CHOICES, "α = 0.1, 100 rounds and unscaled accuracies: the paper gives neither α nor numbers", *notes]
    return _outcome(context, "Figure 3: subsampling and projection", rows, searches, data, rounds, findings, choices)


def _primed(label: str) -> str:
    return label.replace("NTK-FL", "NTK-FL'") if "NTK-FL" in label else label + "'"


def five_methods(context: Context, title: str, name: str, data: DataConfig, choices: Sequence[str]) -> ItemResult:
    """Centralised, NTK-FL (the paper's and ours), DataShare, FedNova and FedAvg on one set of clients."""
    rounds, seeds = (12, 1) if context.quick else (100, 3)
    name, data, notes = available(context, name, data)
    entries = [entry(label, context) for label in (CENTRAL, PAPER, OURS, SHARE, NOVA, FEDAVG)]
    with context.pool() as pool:
        rows, searches = context.compare(comparison(name, context, data, entries, rounds=rounds, seeds=seeds), pool)
    findings = [fewer_rounds(rows), ahead(rows), near_centralised(rows), chosen_t(rows)]
    said = [*CHOICES, f"{rounds} rounds: the paper gives no number", *choices, *notes]
    return _outcome(context, title, rows, searches, data, rounds, findings, said)


def level(row: Row, at: int | None = None) -> float:
    """Mean over seeds and the last `TAIL` rounds up to round `at` (the end)."""
    tails = [curve[:at][-TAIL:] for curve in row.accuracy if curve]
    return statistics.mean(v for tail in tails for v in tail)


def first_at(row: Row, target: float) -> float | None:
    """Mean over seeds of the first round at or above `target`; None where a seed never is."""
    firsts = [next((i + 1 for i, a in enumerate(curve) if a >= target), None) for curve in row.accuracy]
    return None if None in firsts else statistics.mean(f for f in firsts if f is not None)


def fewer_rounds(rows: Sequence[Row]) -> Verdict:
    at = {row.label: row for row in rows}
    goal, length = level(at[FEDAVG]), at[FEDAVG].length
    need = {label: first_at(at[label], goal) for label in (PAPER, OURS)}
    ratios = {label: length / n if n else None for label, n in need.items()}
    text = "; ".join(
        f"{label} {'never' if n is None else f'after {n:.1f} ({ratios[label]:.0f} times fewer)'}"
        for label, n in need.items()
    )
    ratio = ratios[PAPER]
    return Verdict(
        "NTK-FL reaches FedAvg's accuracy in an order of magnitude fewer rounds",
        "an order of magnitude",
        f"FedAvg's {goal:.1%} at round {length}: {text}",
        ratio is not None and ratio >= 10,
        "judged by the paper's variant; FedAvg at the setting its search chose",
    )


def ahead(rows: Sequence[Row]) -> Verdict:
    at = {row.label: row for row in rows}
    ends = {label: level(at[label]) for label in (PAPER, OURS, SHARE, NOVA, FEDAVG)}
    return Verdict(
        "NTK-FL outperforms every federated baseline",
        "consistent advantages over DataShare, FedNova and FedAvg",
        f"at round {at[PAPER].length}: " + ", ".join(f"{label} {100 * end:.1f} %" for label, end in ends.items()),
        all(ends[PAPER] > ends[label] for label in (SHARE, NOVA, FEDAVG)),
        f"ours is ahead of {_list([b for b in (SHARE, NOVA, FEDAVG) if ends[OURS] > ends[b]])}",
    )


def near_centralised(rows: Sequence[Row]) -> Verdict:
    at = {row.label: row for row in rows}
    gaps = {label: 100 * (level(at[label]) - level(at[CENTRAL])) for label in (PAPER, OURS)}
    return Verdict(
        "NTK-FL is close to centralised training, an upper bound",
        "similar test performance",
        f"points against centralised at round {at[CENTRAL].length}: "
        + ", ".join(f"{label} {gap:+.1f}" for label, gap in gaps.items()),
        abs(gaps[PAPER]) <= CLOSE,
        "" if max(gaps.values()) <= 0 else "centralised descent on each round's cohort is no upper bound here",
    )


def chosen_t(rows: Sequence[Row]) -> Verdict:
    row = next(row for row in rows if row.label == PAPER)
    steps = sorted(t for seed in row.steps for t in seed if t is not None)
    middle = statistics.median(steps)
    return Verdict(
        "the chosen number of steps is of the order of 10² to 10³",
        "10² to 10³",
        f"median {middle:.0f}, from {steps[0]:.0f} to {steps[-1]:.0f} over {len(steps)} rounds "
        f"(η = {row.setting.get('lr', 0.01):g})",
        100 <= middle < 10_000,
        f"the grid's largest, {max(row.setting['steps']):.0f}, in "
        f"{sum(t == max(row.setting['steps']) for t in steps) / len(steps):.0%} of rounds",
    )


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "none of them"


def _outcome(
    context: Context, title: str, rows: Sequence[Row], searches: Searches, data: DataConfig, rounds: int,
    findings: list[Verdict], choices: list[str],
) -> ItemResult:  # fmt: skip
    figure = Figure(figsize=(8.5, 5.2), layout="constrained")
    draw_rows(figure.subplots(), rows)
    figure.suptitle(f"{title}\n{described(data, rows)}", fontsize=11)
    settings = {"data": data.model_dump(), "clients_per_round": 20, "rounds": rounds, "network": "d1-100-10 perceptron"}
    said = [*choices, QUICK_CHOICE] if context.quick else choices
    return ItemResult(settings, rows[0].seeds, {"curves": kept(rows, searches)}, findings, figure, said)


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
    ends = sorted(level(row) for row in rows)
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
        ["other writers than the paper's: 300 writers with at least 16 training digits of those to be had"],
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
    Item("fig3", "what subsampling and projection cost NTK-FL and FedAvg (Fashion-MNIST)", figure3),
    Item("fig4a", "accuracy by round on FEMNIST, by writer", figure4a),
    Item("fig4b", "accuracy by round on MNIST, α = 0.5", figure4b),
    Item("fig4c", "accuracy by round on Fashion-MNIST, α = 0.5", figure4c),
    Item("fig7", "accuracy by round on CIFAR-10, α = 0.1", figure7),
)
