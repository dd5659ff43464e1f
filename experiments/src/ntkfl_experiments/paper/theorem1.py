"""Theorem 1: the squared residual of NTK-FL falls at least like (1 − ηλ/(2N))^t.

Three sequences are kept apart. The theorem speaks of f^(k+1), the network at the evolved weights; its proof follows
gradient descent on the network; the algorithm's own function evolution is that of the linearised network.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure

from ntkfl_experiments.paper import axes
from ntkfl_experiments.paper.analysis import ALPHA, CHOICES, DELTA, Cell, available, finite, settings, unit_inputs, work
from ntkfl_experiments.paper.axes import BLACK, BLUE, GREEN, ORANGE, PINK, YELLOW, curve, pick, values
from ntkfl_experiments.paper.item import Beside, Context, Findings, Item, ItemResult, Verdict, crossed
from ntkfl_experiments.theory.decay import descent_factor, proof_factor, requirements
from ntkfl_experiments.theory.dynamics import descend, evolved, furthest_move, squared_residual
from ntkfl_experiments.theory.two_layer import draw, in_span, limit_kernel, sampled_kernel, smallest_eigenvalue

EXPONENTS = (0.03, 0.1, 0.3, 1, 3, 10, 25)  # of e in the bound: steps at which it is e^{−0.03} … e^{−25}
WIDEST = 400_000  # neurons in the span of the inputs; the width asked for is reported where it is more
PAPERS_LAST = 2000  # NTK-FL chooses t from {100, 200, …, 2000}


def measure(key: Mapping[str, Any]) -> dict[str, Any]:
    """‖f(t) − y‖²/‖f(0) − y‖² along the three sequences, beside the bound, for one draw of the weights.

    `width` and `lr` of None take what the theorem asks for, `steps` of None those of `EXPONENTS`. Gradient descent goes
    to the last of the steps that is at most `descend_to`.
    """
    samples = int(key["samples"])
    x, y = unit_inputs(key["dataset"], samples, key["pictures"])
    z = in_span(x)
    smallest = smallest_eigenvalue(limit_kernel(x))
    asked = requirements(samples, smallest, ALPHA, DELTA)
    width = int(key["width"] or min(math.ceil(asked.width), WIDEST))
    lr = float(key["lr"] or asked.lr)
    steps = [int(t) for t in key["steps"] or (math.ceil(s * 2 * samples / (lr * smallest)) for s in EXPONENTS)]
    network = draw(width, z.shape[1], key["seed"])
    start = squared_residual(network, z, y)
    evolution = evolved(network, z, y, lr, steps)
    descended: list[float | None] = []
    moved = 0.0
    for state in descend(network, z, y, lr, max((t for t in steps if t <= key["descend_to"]), default=0)):
        if state.step in steps:
            descended.append(finite(float(state.residual.square().sum()) / start))
            moved = furthest_move(state.network, network)
    kernel = network.kernel(z)
    eigenvalues = torch.linalg.eigvalsh(kernel)
    return {
        "width": width,
        "lr": lr,
        "steps": steps,
        "smallest_limit": smallest,
        "smallest": float(eigenvalues[0]),
        "largest": float(eigenvalues[-1]),
        "asked_width": asked.width,
        "asked_width_to_stay": asked.width_to_stay,
        "asked_lr": asked.lr,
        "radius": asked.radius,
        "moved": max(moved, furthest_move(evolution.networks[-1], network)),
        "bound": [descent_factor(lr, smallest, samples, t) for t in steps],
        "linearised": [finite(float(r.square().sum()) / start) for r in evolution.residuals],
        "network": [finite(squared_residual(n, z, y) / start) for n in evolution.networks],
        "descent": descended,
    }


def sampling_error(key: Mapping[str, Any]) -> dict[str, float]:
    """The largest entry of |H_∞ sampled − H_∞ in closed form|, and the largest standard error an entry can have."""
    x, _ = unit_inputs(key["dataset"], key["samples"], key["pictures"])
    error = (sampled_kernel(in_span(x), key["draws"], key["seed"]) - limit_kernel(x)).abs().max()
    return {"error": float(error), "standard_error": 0.5 / math.sqrt(key["draws"])}


def run(context: Context) -> ItemResult:
    name, quick = available("fashion-mnist"), context.quick
    small, draws = ([2, 4], 30) if quick else ([2, 4, 8], 100)
    theorems = {"dataset": name, "pictures": 0, "width": None, "lr": None, "steps": None, "descend_to": 1000}
    asked = [key for key in crossed({"samples": small, "seed": range(draws)}, **theorems)
             if key["samples"] <= 4 or key["seed"] < 10]  # fmt: skip
    steps = [1, 3, 10, 30, 100, 300] if quick else [1, 3, 10, 30, 100, 300, 1000]
    sizes, widths, seeds = ([50], [64, 512, 2048], 2) if quick else ([50, 100, 200], [64, 256, 1024, 4096], 3)
    common = {"dataset": name, "steps": steps, "descend_to": 1000}
    practical = crossed({"samples": sizes, "width": widths, "seed": range(seeds)}, lr=1.0, **common)
    rates = {"lr": [None, 0.1, 1.0, 10.0, 20.0, 40.0], "seed": range(seeds)}
    by_rate = crossed(rates, samples=sizes[-1], width=widths[-2], **common)
    for key in (*practical, *by_rate):
        key["pictures"] = key["seed"]
    counts = [1000, 10_000, 100_000] if quick else [1000, 10_000, 100_000, 1_000_000]
    sampled = crossed({"draws": counts}, dataset=name, samples=30, pictures=0, seed=0)
    data = {
        "asked": work(context, "as the theorem asks", asked, measure),
        "practical": work(context, "widths and sizes", practical, measure),
        "rates": work(context, "learning rates", by_rate, measure),
        "sampled": work(context, "H_inf by sampling", sampled, sampling_error),
    }
    about = settings(
        dataset=name, alpha=ALPHA, small=small, randomness=draws, samples=sizes, widths=widths, steps=steps
    )
    constants = "the theorem's O(·) and Ω(·) get constants with which its proof goes through: `theory.requirements`"
    return ItemResult(about, list(range(seeds)), data, picture(data), [*CHOICES, constants])


def judge(data: Mapping[str, list[Cell]]) -> Findings:
    return [_theorem(data["asked"]), _remark(data)], [*_as_asked(data["asked"]), *_elsewhere(data)]


def _as_wide(asked: list[Cell]) -> list[Cell]:
    return [c for c in asked if c["width"] >= c["asked_width"]]


def _theorem(asked: list[Cell]) -> Verdict:
    """The theorem is of the t that the algorithm chooses, where the network's own loss is least on its grid."""
    wide = _as_wide(asked)
    held, longer = ([_at_least_loss(c, last) for c in wide] for last in (PAPERS_LAST, math.inf))
    kept, later = statistics.fmean(held), statistics.fmean(longer)
    sizes = sorted({c["samples"] for c in wide})
    own = {n: [h for h, c in zip(held, wide, strict=True) if c["samples"] == n] for n in sizes}
    by_size = ", ".join(f"{sum(h)} of {len(h)} for N = {n}" for n, h in own.items())
    floors = [c["network"][-1] for c in wide]
    widths = f"width {min(c['width'] for c in wide):,} to {max(c['width'] for c in wide):,}"
    return Verdict(
        "Theorem 1: ‖f^(k+1) − y‖² ≤ (1 − ηλ/2N)^t ‖f^(k) − y‖² at the t that NTK-FL chooses",
        f"with probability at least {1 - DELTA:.0%}",
        f"in {kept:.0%} of {len(wide)} draws with t up to {PAPERS_LAST:,}, as the paper's ({by_size}; {widths}); in "
        f"{later:.0%} on a grid that goes on to t = {max(c['steps'][-1] for c in wide):,}",
        all(statistics.fmean(h) >= 1 - DELTA for h in own.values()),
        "f^(k+1) is the network at the evolved weights, whose residual stops falling at "
        f"{min(floors):.0e} to {max(floors):.0e} of the start while the bound goes on to 0",
        f"in {kept:.0%} of {len(wide)} draws, t ≤ {PAPERS_LAST:,}; {later:.0%} with longer t",
    )


def _at_least_loss(cell: Cell, last: float) -> bool:
    """Whether the bound holds at the t ≤ last where the network's loss is least."""
    found = zip(cell["steps"], cell["network"], cell["bound"], strict=True)
    return _inside(*min((measured, bound) for t, measured, bound in found if t <= last))


def _remark(data: Mapping[str, list[Cell]]) -> Verdict:
    cells = [*data["practical"], *data["rates"], *data["asked"]]
    falls = [_falls(c["linearised"]) for c in cells]
    return Verdict(
        "the prediction error of the function evolution decreases with t (Remark 1)",
        "“the neural network prediction error is a decreasing function of the update steps t”",
        f"in {sum(falls)} of {len(falls)} runs",
        all(falls),
        short=f"in {sum(falls)} of {len(falls)} runs",
    )


def _as_asked(asked: list[Cell]) -> list[Beside]:
    """At the width and learning rate the theorem asks for."""
    wide = _as_wide(asked)
    held = {kind: statistics.fmean(_holds(c, kind) for c in wide) for kind in ("network", "linearised", "descent")}
    fails = [
        next((s for s, m, b in zip(EXPONENTS, c["network"], c["bound"], strict=True) if not _inside(m, b)), math.inf)
        for c in wide
    ]
    stays = [c["moved"] <= c["radius"] for c in wide]
    factors = [
        proof_factor(c["lr"], c["smallest_limit"], c["samples"], c["width"], c["moved"], ALPHA, DELTA) for c in wide
    ]
    far = max(wide, key=lambda c: c["moved"] / c["radius"])
    reached = {c["samples"]: c["bound"][len(c["descent"]) - 1] for c in wide if c["descent"]}
    return [
        Beside(
            "Theorem 1's bound at every t of the grid",
            f"the network at the evolved weights keeps it in {held['network']:.0%} of draws, nowhere broken before the "
            f"bound is e^-{min(fails):g}; the function evolution in {held['linearised']:.0%}, down to "
            f"e^-{EXPONENTS[-1]}; gradient descent, which the proof follows, in {held['descent']:.0%} as far as it was "
            "run, where the bound is " + ", ".join(f"{b:.2g} (N = {n})" for n, b in reached.items()),
        ),
        Beside(
            "how far weights move at the width Ω(N²/λ² ln(N²/δ)), which the proof wants below R",
            f"within R in {sum(stays)} of {len(stays)} draws; furthest {far['moved'] / far['radius']:.0f} times R; "
            f"with the distance measured the proof's own factor is above 1 in {sum(f > 1 for f in factors)} of "
            f"{len(factors)}; to stay within R takes a width of order N⁴/λ⁴, here "
            f"{min(c['asked_width_to_stay'] for c in wide):.0e} and more",
        ),
    ]


def _elsewhere(data: Mapping[str, list[Cell]]) -> list[Beside]:
    """Assumption 3, H_∞, and the bound at widths and learning rates that people use."""
    asked, practical, rates, sampled = data["asked"], data["practical"], data["rates"], data["sampled"]
    ok = [all(_holds(c, kind) for kind in ("linearised", "network", "descent")) for c in practical]
    faster = [math.log(c["linearised"][-1]) / math.log(c["bound"][-1]) for c in practical]
    worst = min(practical, key=lambda c: c["smallest"] / c["smallest_limit"])
    promised = [c for c in rates if c["lr"] == c["asked_lr"]]
    drops = [1 - descent_factor(c["lr"], c["smallest_limit"], c["samples"], 2000) for c in promised]
    chosen = sorted({c["lr"] for c in rates} - {c["lr"] for c in promised})
    bad = [r for r in chosen if not all(_holds(c, "network") for c in rates if c["lr"] == r)]
    good = [f"{r:g}" for r in chosen if r not in bad]
    steep = {r: max(c["lr"] * c["largest"] / c["samples"] for c in rates if c["lr"] == r) for r in chosen}
    limits = [c["smallest_limit"] for group in (asked, practical) for c in group]
    return [
        Beside(
            "λ_k, which Assumption 3 takes to be positive",
            f"{max(limits):.2g} (N = {min(c['samples'] for c in asked)}) down to {min(limits):.2g} "
            f"(N up to {max(c['samples'] for c in practical)})",
        ),
        Beside(
            "H_∞ in closed form, x_i·x_j (π − θ)/2π, against sampled weights",
            "largest error of an entry " + ", ".join(f"{c['error']:.0e} from {c['draws']:,} draws" for c in sampled),
        ),
        Beside(
            "Theorem 1's bound at practical widths and η = 1",
            f"holds in {sum(ok)} of {len(ok)} runs for all three sequences; the linearised residual falls "
            f"{min(faster):.0f} to {max(faster):.0f} times as fast in ln; λ_min(H) was at least "
            f"{worst['smallest'] / worst['smallest_limit']:.2f} λ_k (width {worst['width']}, N = {worst['samples']})",
        ),
        Beside(
            "what Theorem 1 promises at the learning rate it asks for",
            f"a fall by {min(drops):.0e} to {max(drops):.0e} in 2,000 steps at N = {promised[0]['samples']}: η = "
            f"λ/(2N) is {promised[0]['lr']:.0e} and the width asked for {promised[0]['asked_width']:.0e}",
        ),
        Beside(
            "Theorem 1's bound for the network at the evolved weights at larger learning rates",
            f"holds for η = {', '.join(good)}; fails for η = {', '.join(f'{r:g}' for r in bad) or 'none of these'}; "
            "from ηλ_max/N = 1.59 on the paper's sum of residuals at whole steps overshoots the labels by more than "
            "the first residual (" + ", ".join(f"η = {r:g}: {steep[r]:.2g}" for r in chosen) + ")",
        ),
    ]


def picture(data: Mapping[str, list[Cell]]) -> Figure:
    figure, (asked, practical, by_rate) = axes.panels(3, "Theorem 1: how fast the squared residual falls")
    names = [("linearised", BLUE, "linearised"), ("network", ORANGE, "network at the NTK weights")]
    size = max(n for n in values(data["asked"], "samples") if n <= 4)
    runs = pick(data["asked"], samples=size)
    steps, shown = runs[0]["steps"], len(runs[0]["descent"])
    for kind, colour, label in names:
        axes.band(asked, steps, [[max(v, 1e-16) for v in c[kind]] for c in runs], colour, label)
    axes.band(asked, steps[:shown], [c["descent"] for c in runs], YELLOW, "gradient descent")
    curve(asked, steps, runs[0]["bound"], "--", BLACK, "bound")
    asked.set_ylim(bottom=1e-13)
    axes.finish(asked, f"as asked for: N = {size}, width {runs[0]['width']:,}", "steps t", "‖f − y‖², relative")
    width = max(values(data["practical"], "width"))
    for size, colour in zip(values(data["practical"], "samples"), (BLUE, GREEN, PINK), strict=False):
        runs = pick(data["practical"], samples=size, width=width)
        axes.band(practical, runs[0]["steps"], [c["network"] for c in runs], colour, f"NTK weights, N = {size}")
        for kind, style in (("descent", ":"), ("bound", "--")):
            middle = axes.medians([c[kind] for c in runs])
            practical.plot(runs[0]["steps"][: len(middle)], middle, style, color=colour)
    for style, label in ((":", "gradient descent"), ("--", "bound")):
        practical.plot([], [], style, color=BLACK, label=label)
    axes.finish(practical, f"width {width:,}, η = 1", "steps t", "‖f − y‖², relative")
    rates = sorted({c["lr"] for c in data["rates"]} - {c["asked_lr"] for c in data["rates"]})
    one = data["rates"][0]
    at = len(one["descent"]) - 1  # the last step that gradient descent was taken to
    for kind, colour, label in [*names, ("descent", YELLOW, "gradient descent"), ("bound", BLACK, "bound")]:
        found = [[c[kind][at] for c in pick(data["rates"], lr=r) if c[kind][at] is not None] for r in rates]
        points = [(r, statistics.median(v)) for r, v in zip(rates, found, strict=True) if v]
        style = "--" if kind == "bound" else "-o"
        curve(by_rate, [r for r, _ in points], [v for _, v in points], style, colour, label)
    title = f"after {one['steps'][at]} steps, N = {one['samples']}"
    axes.finish(by_rate, title, "learning rate η", "‖f − y‖², relative")
    return figure


def _inside(measured: float | None, bound: float) -> bool:
    """Up to the rounding of a residual that has gone."""
    return measured is not None and measured <= bound * (1 + 1e-12) + 1e-28


def _holds(cell: Cell, kind: str) -> bool:
    """At every step reached."""
    return all(_inside(measured, bound) for measured, bound in zip(cell[kind], cell["bound"], strict=False))


def _falls(values: Sequence[float]) -> bool:
    return all(b <= a * (1 + 1e-9) + 1e-28 for a, b in itertools.pairwise([1.0, *values]))


THEOREM1 = Item("theorem1", "Theorem 1: NTK-FL's residual falls by (1 − ηλ/2N)^t", run, judge)
