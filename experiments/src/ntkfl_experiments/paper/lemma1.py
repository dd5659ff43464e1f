"""Lemma 1: how many activations can flip when every neuron's weights move by at most R."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from matplotlib.figure import Figure

from ntkfl_experiments.paper.analysis import ALPHA, CHOICES, DELTA, Cell, available, settings, unit_inputs, work
from ntkfl_experiments.paper.axes import BLACK, BLUE, GREEN, ORANGE, PINK, curve, finish, panels, pick, values
from ntkfl_experiments.paper.item import Beside, Context, Findings, Item, ItemResult, Verdict, crossed
from ntkfl_experiments.theory.bounds import FLIP, flips, flips_concentrated, flips_everywhere
from ntkfl_experiments.theory.dynamics import descended, flipped, furthest_move, within_reach
from ntkfl_experiments.theory.two_layer import draw, in_span


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
    sizes = [within_reach(draw(width, x.shape[1], seed), x, radius).double() for seed in range(key["draws"])]
    most = [float(own.max()) for own in sizes]
    return {
        "mean": statistics.fmean(float(own.mean()) for own in sizes),
        "most": statistics.fmean(most),
        "expected": width * math.erf(radius / (ALPHA * math.sqrt(2))),
        "bounds": bounds,
        "one": statistics.fmean(float(own[0]) <= bounds["printed"] for own in sizes),
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
    grid = crossed({"width": widths, "radius": radii}, dataset=name, samples=50, pictures=0, draws=draws // 4)
    tight = crossed(
        {"dataset": ("orthonormal", name), "width": widths[:2], "samples": [1, 3, 10, 30, 100]}, pictures=0, draws=draws
    )
    for key in tight:  # R so small that the bound is just below one neuron: then a single flip anywhere breaks it
        key["radius"] = 0.99 * DELTA * ALPHA / (FLIP * key["width"])
    steps = 100 if quick else 300
    trained = crossed({"width": widths, "pictures": range(3)}, dataset=name, samples=50, lr=1.0, steps=steps)
    data = {
        "grid": work(context, "flips by radius", grid, count),
        "tight": work(context, "flips where the bound is below one", tight, count),
        "trained": work(context, "flips in training", trained, train),
    }
    about = settings(dataset=name, alpha=ALPHA, widths=widths, radii=radii, randomness=draws)
    return ItemResult(about, list(range(3)), data, picture(data), CHOICES)


def judge(data: Mapping[str, list[Cell]]) -> Findings:
    grid, tight, trained = data["grid"], data["tight"], data["trained"]
    draws = sum(c["draws"] for c in tight)
    noise = 3 * math.sqrt(DELTA * (1 - DELTA) / draws)
    several = [c["all"] for c in [*grid, *tight] if c["samples"] > 1]
    off = [abs(c["mean"] / c["expected"] - 1) for c in grid if c["expected"] * c["draws"] > 100]
    loose = [c["bounds"]["printed"] / c["mean"] for c in grid if c["mean"] > 0]
    worst = min(tight, key=lambda c: c["all"]["printed"])
    real = min((c for c in tight if c["dataset"] != "orthonormal"), key=lambda c: c["all"]["printed"])
    below = sum(c["flipped"] <= c["printed"] for c in trained)
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
            f"holds in {statistics.fmean(c['one'] for c in tight):.1%} of {draws:,} draws where it is tightest, "
            f"{min(c['one'] for c in grid):.1%} elsewhere, where it is {min(loose):.0f} to {max(loose):.0f} times the "
            f"mean size of S_i; that is within {max(off):.1%} of n·erf(R/√2α)",
        ),
        Beside(
            "Lemma 1 for all i, with a union (N times the bound) or by Hoeffding",
            f"{min(held['everywhere'] for held in several):.1%} and "
            f"{min(held['concentrated'] for held in several):.1%} of draws at worst (N > 1)",
        ),
        Beside(
            "activations that training flips, against Lemma 1 at the distance moved",
            f"below it in {below} of {len(trained)} runs; up to "
            f"{max(c['flipped'] / c['width'] for c in trained):.0%} of neurons flip, "
            f"{max(c['flipped'] / c['reachable'] for c in trained):.0%} of those in reach; in "
            f"{sum(c['printed'] >= c['width'] for c in trained)} of {len(trained)} runs the bound is above n",
        ),
    ]


def picture(data: Mapping[str, list[Cell]]) -> Figure:
    figure, (left, right) = panels(2, "Lemma 1: activations that a move of R can flip")
    width = max(values(data["grid"], "width"))
    grid = pick(data["grid"], width=width)
    radii = [c["radius"] for c in grid]
    curve(left, radii, [c["mean"] / width for c in grid], "-o", BLUE, "|S_i|/n, mean over i")
    curve(left, radii, [c["most"] / width for c in grid], "-o", GREEN, "|S_i|/n, largest")
    for kind, style, colour, label in (
        ("printed", "--", ORANGE, "printed"),
        ("concentrated", "-.", BLACK, "all i, Hoeffding"),
        ("everywhere", ":", PINK, "all i, union"),
    ):
        curve(left, radii, [c["bounds"][kind] / width for c in grid], style, colour, f"bound, {label}")
    left.axhline(1, color="#999999", linewidth=0.8)
    finish(left, f"n = {width:,}, N = {grid[0]['samples']} pictures", "R", "fraction of neurons")
    for kind, colour in zip(values(data["tight"], "dataset"), (BLUE, ORANGE), strict=True):
        for w, style in zip(values(data["tight"], "width"), ("-o", "--s"), strict=True):
            cells = pick(data["tight"], dataset=kind, width=w)
            broken = [1 - c["all"]["printed"] for c in cells]
            curve(right, [c["samples"] for c in cells], broken, style, colour, f"{kind}, n = {w}")
    right.axhline(DELTA, color=BLACK, linestyle=":", label="δ")
    right.set_ylim(0, 1.02)
    title = "R at which the printed bound is 0.99 neurons"
    finish(right, title, "inputs N", "draws that break the bound for some i", logy=False)
    return figure


LEMMA1 = Item("lemma1", "Lemma 1: how many activations flip", run, judge)
