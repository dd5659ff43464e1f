"""Lemma 2: its bound on ‖w^(k,t) − w̃^(k,t)‖₁ as printed, with the R that was lost, and what it leaves out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from ntkfl_experiments.paper import axes
from ntkfl_experiments.paper.analysis import ALPHA, CHOICES, DELTA, Cell, available, settings, work
from ntkfl_experiments.paper.axes import BLACK, BLUE, GREEN, ORANGE, PINK, YELLOW, pick, slope, values
from ntkfl_experiments.paper.item import Beside, Context, Findings, Item, ItemResult, Verdict, crossed
from ntkfl_experiments.paper.weight_gap import analysis_network, grid
from ntkfl_experiments.theory import bounds as theory


def run(context: Context) -> ItemResult:
    name, quick = available("fashion-mnist"), context.quick
    samples, steps, seeds = (40, grid(200), range(10)) if quick else (100, grid(1000), range(10))
    widths = [64, 256, 1024] if quick else [64, 256, 1024, 4096]
    keys = crossed({"width": widths, "seed": seeds}, dataset=name, samples=samples, lr=1.0, steps=steps, every=True)
    keys = [key for key in keys if key["width"] <= 1024 or key["seed"] < 3]
    curves = work(context, "weights by step and width", keys, analysis_network)
    for cell in curves:
        cell["bounds"] = bounds(cell, furthest(curves, cell))
    about = settings(dataset=name, alpha=ALPHA, samples=samples, widths=widths, steps=steps, lr=1.0)
    radius = "η = 1; R is the furthest any neuron went in any draw of that width, so it does not depend on the draw"
    return ItemResult(about, list(seeds), {"curves": curves}, picture(curves), [*CHOICES, radius])


def furthest(curves: list[Cell], cell: Cell) -> list[float]:
    """R for each step: over all draws of the cell's width, so that it is not chosen after the draw."""
    return [max(v) for v in zip(*(c["moved"] for c in pick(curves, width=cell["width"])), strict=True)]


def bounds(cell: Cell, radii: list[float]) -> dict[str, list[float]]:
    """Each bound at each step; `both` adds what two residual sequences can make to the corrected one."""
    n, d1, lr = cell["width"], cell["inputs"], cell["lr"]
    rows = list(zip(cell["gammas"], radii, cell["differing"], strict=True))
    within = [theory.weight_gap_within(n, d1, lr, ALPHA, DELTA, [gamma], radius) for gamma, radius, _ in rows]
    return {
        "printed": [theory.weight_gap(n, d1, lr, ALPHA, DELTA, [gamma]) for gamma, _, _ in rows],
        "certain": [theory.weight_gap_certain(n, d1, lr, [gamma]) for gamma, _, _ in rows],
        "within": within,
        "explicit": [theory.weight_gap_explicit(d1, lr, ALPHA, DELTA, [gamma], cell["first"]) for gamma, _, _ in rows],
        "both": [w + theory.residual_gap(n, d1, lr, [d]) for w, (_, _, d) in zip(within, rows, strict=True)],
    }


def judge(data: Mapping[str, list[Cell]]) -> Findings:
    curves = data["curves"]
    later = range(1, len(curves[0]["steps"]))  # at t = 1 both are equal

    def held(measured: str, bound: str) -> list[bool]:
        return [c[measured][i] <= c["bounds"][bound][i] for c in curves for i in later]

    def room(measured: str, bound: str) -> float:
        pairs = [(c[measured][i], c["bounds"][bound][i]) for c in curves for i in later]
        return statistics.median([float(b / m) for m, b in pairs if m > 0])

    def growth(last: Sequence[list[float]]) -> float:
        return slope(widths, [statistics.median(group) for group in last])

    widths = values(curves, "width")
    groups = [pick(curves, width=width) for width in widths]
    by_width = {kind: growth([[c[kind][-1] for c in group] for group in groups]) for kind in ("gap", "lemma")}
    printed = growth([[c["bounds"]["printed"][-1] for c in group] for group in groups])
    trivial = [c["bounds"]["certain"][i] <= c["bounds"]["printed"][i] for c in curves for i in later]
    outside = statistics.median(c["gap"][-1] / c["lemma"][-1] for c in curves)
    inside, radii = held("gap", "printed"), [c["moved"][-1] for c in curves]
    all_draws = [all(c["lemma"][i] <= c["bounds"]["within"][i] for i in later) for c in curves]
    return [
        Verdict(
            "Lemma 2: ‖w − w̃‖₁ ≤ √(2 n d1) η/(√π δ α) Σγ",
            "with probability 1 − δ",
            f"holds at {sum(inside)} of {len(inside)} points, {room('gap', 'printed'):.0f} times the gap (median)",
            all(inside) and all(held("lemma", "printed")),
            f"at {sum(trivial)} of {len(trivial)} points it is above √(n d1) η Σγ, which holds with certainty, since "
            "no more than n neurons flip: its probability does no work",
            f"at {sum(inside)} of {len(inside)} points; {room('gap', 'printed'):,.0f} times the gap",
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
            f"at the last step the gap goes like n^{by_width['gap']:.2f}, the lemma's part like "
            f"n^{by_width['lemma']:.2f}, the printed bound like n^{printed:.2f}; with "
            f"R ≤ (η/√n) Σγ put in the bound does not depend on n, and holds at {sum(held('lemma', 'explicit'))} of "
            f"{len(inside)} points",
        ),
        Beside(
            "residuals of their own for both descents",
            f"the algorithm's gap is {outside:.2f} times the one with shared residuals at the last step (median); the "
            f"bound with R holds for it at {sum(held('gap', 'within'))} of {len(inside)} points, with the residuals' "
            f"difference added at {sum(held('gap', 'both'))}",
        ),
    ]


def picture(curves: list[Cell]) -> Figure:
    figure, (left, right) = axes.panels(2, "Lemma 2: NTK weights and gradient descent weights")
    widths = values(curves, "width")
    middle, groups = pick(curves, width=widths[-2]), [pick(curves, width=width) for width in widths]
    steps = middle[0]["steps"][1:]
    for kind, colour, label in (("gap", BLUE, "the algorithm's"), ("lemma", GREEN, "with shared residuals")):
        axes.band(left, steps, [c[kind][1:] for c in middle], colour, f"‖w − w̃‖₁, {label}")
        last = [statistics.median(c[kind][-1] for c in group) for group in groups]
        axes.curve(right, widths, last, "-o", colour, f"‖w − w̃‖₁, {label}")
    for kind, style, colour, label in (
        ("printed", "--", BLACK, "bound, printed"),
        ("certain", "-.", PINK, "certain: all may flip"),
        ("within", "--", ORANGE, "bound with R"),
        ("explicit", ":", YELLOW, "bound without n"),
    ):
        axes.curve(left, steps, axes.medians([c["bounds"][kind][1:] for c in middle]), style, colour, label)
        last = [statistics.median(c["bounds"][kind][-1] for c in group) for group in groups]
        axes.curve(right, widths, last, style, colour, label)
    axes.finish(left, f"n = {widths[-2]:,}, N = {middle[0]['samples']}, η = 1", "steps t", "ℓ1 norm")
    axes.finish(right, f"after {steps[-1]} steps", "width n", "ℓ1 norm")
    return figure


LEMMA2 = Item("lemma2", "Lemma 2: the gap between NTK and gradient descent weights", run, judge)
