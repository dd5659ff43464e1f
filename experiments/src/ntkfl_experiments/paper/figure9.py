"""Figure 9: ‖w^(k,t) − w̃^(k,t)‖₁ against t on Fashion-MNIST and FEMNIST, beside the paper's curve 2 Σ γ.

The caption sets the lemma's coefficient to 2; the lemma's own is √(2 n d1) η/(√π δ α), and with the R it lost, R times
that.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure

from ntkfl_experiments.paper.analysis import ALPHA, CHOICES, DELTA, Cell, available, settings, work
from ntkfl_experiments.paper.axes import BLACK, BLUE, GREEN, ORANGE, PINK, YELLOW, band, finish, panels, pick, slope
from ntkfl_experiments.paper.item import Beside, Context, Findings, Item, ItemResult, Verdict, crossed
from ntkfl_experiments.paper.weight_gap import analysis_network, grid, perceptron
from ntkfl_experiments.theory.bounds import weight_gap, weight_gap_within

NETWORKS = {
    "analysis": ("network of the analysis, MSE", BLUE),
    "mlp-mse": ("784-100-10, MSE", GREEN),
    "mlp-ce": ("784-100-10, cross-entropy", ORANGE),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "analysis": {"lr": 0.1, "every": False},
    "mlp-mse": {"loss": "mse", "lr": 0.01},
    "mlp-ce": {"loss": "ce", "lr": 0.01},
}


def one(key: Mapping[str, Any]) -> Cell:
    """One curve."""
    return analysis_network(key) if key["network"] == "analysis" else perceptron(key)


def run(context: Context) -> ItemResult:
    names = list(dict.fromkeys(available(name) for name in ("fashion-mnist", "femnist")))
    samples, steps, seeds = (100, grid(200), range(2)) if context.quick else (400, grid(2000), range(3))
    axes = {"dataset": names, "seed": seeds, "network": NETWORKS}
    keys = [key | OPTIONS[key["network"]] for key in crossed(axes, samples=samples, steps=steps, width=100)]
    curves = work(context, "weights by step", keys, one)
    choices = [
        *CHOICES,
        "the paper names neither network, loss, learning rate, number of samples nor t: width 100 as "
        "in its experiments, η = 0.1 (analysis) and 0.01 (784-100-10, Kaiming, normalised pictures)",
        "γ is the largest error over samples and outputs along gradient descent, y − f or y − softmax f",
        "cross-entropy has no closed form: the paper's trace kernel along its flow",
    ]
    about = settings(datasets=names, samples=samples, width=100, steps=steps[-1])
    return ItemResult(about, list(seeds), {"curves": curves}, picture(curves), choices)


def judge(data: Mapping[str, list[Cell]]) -> Findings:
    curves = data["curves"]

    def later(cell: Cell) -> list[tuple[float, float]]:
        """(gap, Σγ) where Σγ is not empty."""
        pairs = zip(cell["gap"], cell["gammas"], strict=True)
        return [(gap, gamma) for gap, gamma in pairs if gap is not None and gamma]

    rises = [all(b > a for (a, _), (b, _) in pairwise(later(c))) for c in curves]
    by = {name: [later(c) for c in pick(curves, network=kind)] for kind, (name, _) in NETWORKS.items()}
    below = {name: [gap <= 2 * gamma for own in cells for gap, gamma in own] for name, cells in by.items()}
    ratio = {name: [gap / gamma for own in cells for gap, gamma in own] for name, cells in by.items()}
    growth = {n: statistics.median(slope([g for _, g in own], [w for w, _ in own]) for own in by[n]) for n in by}
    lemma = pick(curves, network="analysis")
    coefficient = statistics.median(weight_gap(c["width"], c["inputs"], c["lr"], ALPHA, DELTA, [1.0]) for c in lemma)
    true = [weight_gap_within(c["width"], c["inputs"], c["lr"], ALPHA, DELTA, [1.0], c["moved"][-1]) for c in lemma]
    return [
        Verdict(
            "the difference between NTK and gradient descent weights increases with t (Figure 9)",
            "“the weight difference increases when more update steps are used”",
            f"at every step of the grid in {sum(rises)} of {len(rises)} curves",
            all(rises),
            short=f"in {sum(rises)} of {len(rises)} curves",
        ),
        Verdict(
            "2 Σγ is above the difference (Figure 9)",
            "“for the analytical upper bound … set the coefficient to 2”",
            "; ".join(f"{name}: at {sum(v)} of {len(v)} points" for name, v in below.items()),
            None,
            "the paper states neither network nor η, by which the lemma's coefficient goes: "
            f"{coefficient:.0f} as printed at η = {lemma[0]['lr']}, {coefficient * 1e-3 / lemma[0]['lr']:.2f} at 10⁻³",
            f"at {sum(map(sum, below.values()))} of {sum(map(len, below.values()))} points; depends on η",
        ),
    ], [
        Beside("‖w − w̃‖₁/Σγ", "; ".join(f"{name} {min(v):.2g} to {max(v):.2g}" for name, v in ratio.items())),
        Beside(
            "Lemma 2's coefficient with its R, for the network of the analysis", f"{min(true):.2g} to {max(true):.2g}"
        ),
        Beside(
            "trend: the difference grows like (Σγ)^p",
            "p = " + ", ".join(f"{v:.2f} ({name})" for name, v in growth.items()),
        ),
    ]


def picture(curves: list[Cell]) -> Figure:
    names = list(dict.fromkeys(c["dataset"] for c in curves))
    figure, axes = panels(len(names), "Figure 9: NTK weights and gradient descent weights")
    for axis, name in zip(axes, names, strict=True):
        for kind, (label, colour) in NETWORKS.items():
            cells = pick(curves, dataset=name, network=kind)
            steps = cells[0]["steps"]
            shown = [i for i in range(1, len(steps)) if all(c["gap"][i] is not None for c in cells)]
            x = [steps[i] for i in shown]
            band(axis, x, [[c["gap"][i] for i in shown] for c in cells], colour, f"‖w − w̃‖₁, {label}")
            sums = [statistics.median(c["gammas"][i] for c in cells) for i in shown]
            axis.plot(x, [2 * s for s in sums], "--", color=colour, linewidth=1)
        axis.plot([], [], "--", color=BLACK, label="2 Σγ, the paper's curve (by colour)")
        cells = pick(curves, dataset=name, network="analysis")
        x = cells[0]["steps"][1:]
        for colour, label, lost in (
            (PINK, "lemma as printed (analysis)", True),
            (YELLOW, "lemma with its R (analysis)", False),
        ):
            bounds = [statistics.median(_bound(c, i, lost) for c in cells) for i in range(1, len(x) + 1)]
            axis.plot(x, bounds, ":", color=colour, label=label)
        finish(axis, name, "steps t", "ℓ1 norm")
    return figure


def _bound(cell: Cell, i: int, lost: bool) -> float:
    """Lemma 2 at the i-th step, without the R that it lost or with it."""
    radius = 1.0 if lost else cell["moved"][i]
    return weight_gap_within(cell["width"], cell["inputs"], cell["lr"], ALPHA, DELTA, [cell["gammas"][i]], radius)


FIGURE9 = Item("fig9", "Figure 9: NTK weights against gradient descent weights", run, judge)
