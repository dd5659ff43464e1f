"""Lemma 1: how many activations can flip when every neuron's weights move by at most R."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from matplotlib.figure import Figure

from ntkfl_experiments.paper.analysis import ALPHA, CHOICES, DELTA, Cell, available, settings, unit_inputs, work
from ntkfl_experiments.paper.axes import BLACK, BLUE, GREEN, ORANGE, PINK, finish, panels
from ntkfl_experiments.paper.item import Beside, Context, Findings, Item, ItemResult, Verdict
from ntkfl_experiments.theory import draw, flips, flips_concentrated, flips_everywhere, in_span
from ntkfl_experiments.theory.bounds import FLIP
from ntkfl_experiments.theory.dynamics import descended, flipped, furthest_move, within_reach


def inputs(key: Mapping[str, Any]) -> torch.Tensor:
    """Pictures in their span, or `samples` orthonormal vectors."""
    if key["dataset"] == "orthonormal":
        return torch.eye(key["samples"], dtype=torch.float64)
    return in_span(unit_inputs(key["dataset"], key["samples"], key["pictures"])[0])


def count(key: Mapping[str, Any]) -> Cell:
    """|S_i| over many draws of the weights: how often each bound holds, for the first input and for all at once."""
    x, width, radius = inputs(key), int(key["width"]), float(key["radius"])
    bounds = {
        "printed": flips(width, radius, ALPHA, DELTA),
        "everywhere": flips_everywhere(width, radius, ALPHA, DELTA, len(x)),
        "concentrated": flips_concentrated(width, radius, ALPHA, DELTA, len(x)),
    }
    means, most, first = [], [], []
    for seed in range(key["draws"]):
        sizes = within_reach(draw(width, x.shape[1], seed), x, radius).double()
        means.append(float(sizes.mean()))
        most.append(float(sizes.max()))
        first.append(float(sizes[0]))
    return {
        "mean": statistics.fmean(means),
        "most": statistics.fmean(most),
        "expected": width * math.erf(radius / (ALPHA * math.sqrt(2))),
        "bounds": bounds,
        "one": statistics.fmean(s <= bounds["printed"] for s in first),
        "all": {name: statistics.fmean(s <= bound for s in most) for name, bound in bounds.items()},
    }


def train(key: Mapping[str, Any]) -> Cell:
    """Activations that gradient descent really flips, beside |S_i| at the distance it really went."""
    x, y = unit_inputs(key["dataset"], key["samples"], key["pictures"])
    z = in_span(x)
    network = draw(key["width"], z.shape[1], key["pictures"])
    after = descended(network, z, y, key["lr"], key["steps"])
    radius = furthest_move(after, network)
    return {
        "radius": radius,
        "flipped": int(flipped(after, network, z).max()),
        "reachable": int(within_reach(network, z, radius).max()),
        "printed": flips(key["width"], radius, ALPHA, DELTA),
    }


def run(context: Context) -> ItemResult:
    name, quick = available("fashion-mnist"), context.quick
    draws = 200 if quick else 1000
    widths = [64, 1024] if quick else [64, 256, 1024, 4096]
    radii = [1e-4, 1e-3, 1e-2, 1e-1]
    common = {"pictures": 0, "draws": draws // 4}
    grid = [{**common, "dataset": name, "samples": 50, "width": w, "radius": r} for w in widths for r in radii]
    # R so small that the bound is just below one neuron: then a single flip anywhere breaks it.
    sizes = [1, 3, 10, 30, 100]
    tight = [
        {
            "pictures": 0,
            "draws": draws,
            "dataset": k,
            "samples": s,
            "width": w,
            "radius": 0.99 * DELTA * ALPHA / (FLIP * w),
        }
        for k in ("orthonormal", name)
        for w in widths[:2]
        for s in sizes
    ]
    trained = [
        {"dataset": name, "samples": 50, "width": w, "pictures": s, "lr": 1.0, "steps": 100 if quick else 300}
        for w in widths
        for s in range(3)
    ]
    data = {
        "grid": work(context, "flips by radius", grid, count),
        "tight": work(context, "flips where the bound is below one", tight, count),
        "trained": work(context, "flips in training", trained, train),
    }
    return ItemResult(
        settings(dataset=name, alpha=ALPHA, widths=widths, radii=radii, randomness=draws),
        list(range(3)),
        data,
        picture(data),
        CHOICES,
    )


def judge(data: Mapping[str, list[Cell]]) -> Findings:
    grid, tight, trained = data["grid"], data["tight"], data["trained"]
    cells = [*grid, *tight]
    tightest = statistics.fmean(c["one"] for c in tight)
    noise = 3 * math.sqrt(DELTA * (1 - DELTA) / sum(c["draws"] for c in tight))
    several = [c for c in cells if c["samples"] > 1]
    off = [abs(c["mean"] / c["expected"] - 1) for c in grid if c["expected"] * c["draws"] > 100]
    loose = [c["bounds"]["printed"] / c["mean"] for c in grid if c["mean"] > 0]
    worst = min(tight, key=lambda c: c["all"]["printed"])
    real = min((c for c in tight if c["dataset"] != "orthonormal"), key=lambda c: c["all"]["printed"])
    flown = [c for c in trained if c["flipped"] > c["printed"]]
    return [
        Verdict(
            "Lemma 1: S_i has at most √(2/π) n R/(δα) neurons, for all i",
            f"with probability at least {1 - DELTA:.0%}, ∀ i",
            f"in {worst['all']['printed']:.0%} of draws (N = {worst['samples']}, {worst['dataset']}, n = "
            f"{worst['width']}); {real['all']['printed']:.0%} for pictures (N = {real['samples']})",
            worst["all"]["printed"] >= 1 - DELTA - noise,
            "Markov's inequality is for one i; where R is so small that the bound is below one neuron, any flip breaks "
            "it. Theorem 1's widths are far from there",
            f"in {worst['all']['printed']:.0%} of draws at worst",
        ),
    ], [
        Beside(
            "Lemma 1 for one input",
            f"holds in {tightest:.1%} of {sum(c['draws'] for c in tight):,} draws where it is tightest, "
            f"{min(c['one'] for c in grid):.1%} elsewhere, where it is {min(loose):.0f} to {max(loose):.0f} times the "
            f"mean size of S_i; that is within {max(off):.1%} of n·erf(R/√2α)",
        ),
        Beside(
            "Lemma 1 for all i, with a union (N times the bound) or by Hoeffding",
            f"{min(c['all']['everywhere'] for c in several):.1%} and "
            f"{min(c['all']['concentrated'] for c in several):.1%} of draws at worst (N > 1)",
        ),
        Beside(
            "activations that training flips, against Lemma 1 at the distance moved",
            f"below it in {len(trained) - len(flown)} of {len(trained)} runs; up to "
            f"{max(c['flipped'] / c['width'] for c in trained):.0%} of neurons flip, "
            f"{max(c['flipped'] / c['reachable'] for c in trained):.0%} of those in reach; in "
            f"{sum(c['printed'] >= c['width'] for c in trained)} of {len(trained)} runs the bound is above n",
        ),
    ]


def picture(data: Mapping[str, list[Cell]]) -> Figure:
    figure, axes = panels(2, "Lemma 1: activations that a move of R can flip")
    width = max(c["width"] for c in data["grid"])
    grid = [c for c in data["grid"] if c["width"] == width]
    radii = [c["radius"] for c in grid]
    axes[0].plot(radii, [c["mean"] / width for c in grid], "-o", color=BLUE, label="|S_i|/n, mean over i", markersize=4)
    axes[0].plot(radii, [c["most"] / width for c in grid], "-o", color=GREEN, label="|S_i|/n, largest", markersize=4)
    names = {
        "printed": ("--", ORANGE, "printed"),
        "concentrated": ("-.", BLACK, "all i, Hoeffding"),
        "everywhere": (":", PINK, "all i, union"),
    }
    for kind, (style, colour, label) in names.items():
        axes[0].plot(radii, [c["bounds"][kind] / width for c in grid], style, color=colour, label=f"bound, {label}")
    axes[0].axhline(1, color="#999999", linewidth=0.8)
    finish(axes[0], f"n = {width:,}, N = {grid[0]['samples']} pictures", "R", "fraction of neurons")
    for kind, colour in zip(sorted({c["dataset"] for c in data["tight"]}), (BLUE, ORANGE), strict=True):
        for w, style in zip(sorted({c["width"] for c in data["tight"]}), ("-o", "--s"), strict=True):
            cells = [c for c in data["tight"] if (c["dataset"], c["width"]) == (kind, w)]
            axes[1].plot(
                [c["samples"] for c in cells],
                [1 - c["all"]["printed"] for c in cells],
                style,
                color=colour,
                label=f"{kind}, n = {w}",
                markersize=4,
            )
    axes[1].axhline(DELTA, color=BLACK, linestyle=":", label="δ")
    axes[1].set_ylim(0, 1.02)
    finish(
        axes[1],
        "R at which the printed bound is 0.99 neurons",
        "inputs N",
        "draws that break the bound for some i",
        logy=False,
    )
    return figure


ITEMS = (Item("lemma1", "Lemma 1: how many activations flip", run, judge),)
