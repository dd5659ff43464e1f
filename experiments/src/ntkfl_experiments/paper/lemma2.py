"""Lemma 2: its bound on ‖w^(k,t) − w̃^(k,t)‖₁ as printed, with the R that was lost, and what it leaves out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from matplotlib.figure import Figure

from ntkfl_experiments.paper.analysis import ALPHA, CHOICES, DELTA, Cell, available, settings, work
from ntkfl_experiments.paper.axes import BLACK, BLUE, GREEN, ORANGE, PINK, YELLOW, band, finish, panels, slope
from ntkfl_experiments.paper.item import Beside, Context, Findings, Item, ItemResult, Verdict
from ntkfl_experiments.paper.weight_gap import analysis_network, grid
from ntkfl_experiments.theory import (
    residual_gap,
    weight_gap,
    weight_gap_certain,
    weight_gap_explicit,
    weight_gap_within,
)


def run(context: Context) -> ItemResult:
    name, quick = available("fashion-mnist"), context.quick
    samples, steps, seeds = (40, grid(200), range(10)) if quick else (100, grid(1000), range(10))
    widths = [64, 256, 1024] if quick else [64, 256, 1024, 4096]
    keys = [
        {"dataset": name, "samples": samples, "width": w, "seed": s, "lr": 1.0, "steps": steps, "every": True}
        for w in widths
        for s in (seeds if w <= 1024 else range(3))
    ]
    data = {"curves": work(context, "weights by step and width", keys, analysis_network)}
    for cell in data["curves"]:
        cell["bounds"] = bounds(cell, furthest(data["curves"], cell))
    return ItemResult(
        settings(dataset=name, alpha=ALPHA, samples=samples, widths=widths, steps=steps, lr=1.0),
        list(seeds),
        data,
        picture(data["curves"]),
        [
            *CHOICES,
            "η = 1; R is the furthest any neuron went in any draw of that width, so it does not depend on the draw",
        ],
    )


def furthest(curves: list[Cell], cell: Cell) -> list[float]:
    """R for each step: over all draws of the cell's width, so that it is not chosen after the draw."""
    return [max(v) for v in zip(*(c["moved"] for c in curves if c["width"] == cell["width"]), strict=True)]


def bounds(cell: Cell, radii: list[float]) -> dict[str, list[float]]:
    """Each bound at each step; `both` adds what two residual sequences can make to the corrected one."""
    n, d1, lr = cell["width"], cell["inputs"], cell["lr"]
    rows = list(zip(cell["gammas"], radii, cell["differing"], strict=True))
    within = [weight_gap_within(n, d1, lr, ALPHA, DELTA, [gamma], radius) for gamma, radius, _ in rows]
    return {
        "printed": [weight_gap(n, d1, lr, ALPHA, DELTA, [gamma]) for gamma, _, _ in rows],
        "certain": [weight_gap_certain(n, d1, lr, [gamma]) for gamma, _, _ in rows],
        "within": within,
        "explicit": [weight_gap_explicit(d1, lr, ALPHA, DELTA, [gamma], cell["first"]) for gamma, _, _ in rows],
        "both": [w + residual_gap(n, d1, lr, [d]) for w, (_, _, d) in zip(within, rows, strict=True)],
    }


def judge(data: Mapping[str, list[Cell]]) -> Findings:
    curves = data["curves"]
    later = range(1, len(curves[0]["steps"]))  # at t = 1 both are equal

    def held(measured: str, bound: str) -> list[bool]:
        return [c[measured][i] <= c["bounds"][bound][i] for c in curves for i in later]

    def room(measured: str, bound: str) -> float:
        pairs = [(c[measured][i], c["bounds"][bound][i]) for c in curves for i in later]
        return statistics.median([float(b / m) for m, b in pairs if m > 0])

    widths = sorted({c["width"] for c in curves})
    by_width = [[c for c in curves if c["width"] == w] for w in widths]
    last = {k: [statistics.median(c[k][-1] for c in group) for group in by_width] for k in ("gap", "lemma")}
    printed = [statistics.median(c["bounds"]["printed"][-1] for c in group) for group in by_width]
    trivial = [c["bounds"]["certain"][i] <= c["bounds"]["printed"][i] for c in curves for i in later]
    outside = statistics.median(c["gap"][-1] / c["lemma"][-1] for c in curves)
    points = len(held("gap", "printed"))
    radii = [c["moved"][-1] for c in curves]
    all_draws = [all(c["lemma"][i] <= c["bounds"]["within"][i] for i in later) for c in curves]
    return [
        Verdict(
            "Lemma 2: ‖w − w̃‖₁ ≤ √(2 n d1) η/(√π δ α) Σγ",
            "with probability 1 − δ",
            f"holds at {sum(held('gap', 'printed'))} of {points} points, {room('gap', 'printed'):.0f} times the gap "
            "(median)",
            all(held("gap", "printed")) and all(held("lemma", "printed")),
            f"at {sum(trivial)} of {len(trivial)} points it is above √(n d1) η Σγ, which holds with certainty, since "
            "no more than n neurons flip: its probability does no work",
            f"at {sum(held('gap', 'printed'))} of {points} points; {room('gap', 'printed'):,.0f} times the gap",
        ),
    ], [
        Beside(
            "Lemma 2 with the R that its last step lost",
            f"R is {min(radii):.2g} to {max(radii):.2g} at the last step; with it the bound is "
            f"{room('lemma', 'within'):.0f} times the gap of shared residuals (median) and holds in "
            f"{statistics.fmean(all_draws):.0%} of {len(all_draws)} draws",
        ),
        Beside(
            "growth with the width",
            f"at the last step the gap goes like n^{slope(widths, last['gap']):.2f}, the lemma's part like "
            f"n^{slope(widths, last['lemma']):.2f}, the printed bound like n^{slope(widths, printed):.2f}; with "
            f"R ≤ (η/√n) Σγ put in the bound does not depend on n, and holds at {sum(held('lemma', 'explicit'))} of "
            f"{points} points",
        ),
        Beside(
            "residuals of their own for both descents",
            f"the algorithm's gap is {outside:.2f} times the one with shared residuals at the last step (median); the "
            f"bound with R holds for it at {sum(held('gap', 'within'))} of {points} points, with the residuals' "
            f"difference added at {sum(held('gap', 'both'))}",
        ),
    ]


def picture(curves: list[Cell]) -> Figure:
    figure, axes = panels(2, "Lemma 2: NTK weights and gradient descent weights")
    widths = sorted({c["width"] for c in curves})
    middle = [c for c in curves if c["width"] == widths[-2]]
    steps = middle[0]["steps"][1:]
    names = {"gap": (BLUE, "the algorithm's"), "lemma": (GREEN, "with shared residuals")}
    for kind, (colour, label) in names.items():
        band(axes[0], steps, [c[kind][1:] for c in middle], colour, f"‖w − w̃‖₁, {label}")
    lines: Mapping[str, tuple[str, str, str]] = {
        "printed": ("--", BLACK, "bound, printed"),
        "certain": ("-.", PINK, "certain: all may flip"),
        "within": ("--", ORANGE, "bound with R"),
        "explicit": (":", YELLOW, "bound without n"),
    }
    for kind, (style, colour, label) in lines.items():
        values = [statistics.median(v) for v in zip(*(c["bounds"][kind][1:] for c in middle), strict=True)]
        axes[0].plot(steps, values, style, color=colour, label=label)
    finish(axes[0], f"n = {widths[-2]:,}, N = {middle[0]['samples']}, η = 1", "steps t", "ℓ1 norm")
    for kind, (colour, label) in names.items():
        values = [statistics.median(c[kind][-1] for c in curves if c["width"] == w) for w in widths]
        axes[1].plot(widths, values, "-o", color=colour, label=f"‖w − w̃‖₁, {label}", markersize=4)
    for kind, (style, colour, label) in lines.items():
        values = [statistics.median(c["bounds"][kind][-1] for c in curves if c["width"] == w) for w in widths]
        axes[1].plot(widths, values, style, color=colour, label=label)
    finish(axes[1], f"after {steps[-1]} steps", "width n", "ℓ1 norm")
    return figure


ITEMS = (Item("lemma2", "Lemma 2: the gap between NTK and gradient descent weights", run, judge),)
