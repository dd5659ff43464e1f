"""What all suites share: how they are asked, a row of their answer, a fair clock, and inputs to time on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ntkfl.data.catalog import load, locate
from ntkfl.errors import DataError

TURN_SECONDS = 0.3
_CLASSES = 10


@dataclass(frozen=True)
class Setting:
    """How to run a suite. `quick` takes sizes that end in seconds and say nothing about speed."""

    quick: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True)
class BenchRow:
    """One way of doing a thing, timed.

    `ratio` is its time over ours; 1 begins a comparison, None is beside any. `difference` is the relative distance of
    its result from ours.
    """

    what: str
    seconds: float
    ratio: float | None = None
    difference: float | None = None
    note: str = ""
    details: dict[str, float] = field(default_factory=dict)


Suite = Callable[[Setting], list[BenchRow]]


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, and what the last call returned."""

    seconds: float
    result: Any


def race(
    ways: Mapping[str, Callable[[], Any]], turns: int, setting: Setting, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Timing]:
    """The best of `turns` turns of each way by the `clock`, taken alternately, so that other work on the machine hits
    all ways alike; the first turn keeps the order given.

    A turn repeats a short way for a while and takes the mean, as a long way does within a single call: otherwise the
    short one alone could slip into a quiet moment of the machine.
    """
    names, least = list(ways), 0.0 if setting.quick else TURN_SECONDS
    best = dict.fromkeys(names, float("inf"))
    results: dict[str, Any] = {}
    for turn in range(1 if setting.quick else turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds, results[name] = _turn(ways[name], least, setting.device, clock)
            best[name] = min(best[name], seconds)
    return {name: Timing(best[name], results[name]) for name in names}


def _turn(way: Callable[[], Any], least: float, device: torch.device, clock: Callable[[], float]) -> tuple[float, Any]:
    finish(device)
    start, calls = clock(), 0
    while True:
        result = way()
        finish(device)
        calls += 1
        spent = clock() - start
        if spent >= least:
            return spent / calls, result


def finish(device: torch.device) -> None:
    """Wait for the device: a GPU works behind Python's back."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    exact = b.double()
    return float((a.double() - exact).norm() / exact.norm())


def fashion(count: int) -> tuple[Tensor, Tensor, str]:
    """x [count, 784], y [count], their name: Fashion-MNIST if it is here (nothing is downloaded), else `synthetic`."""
    try:
        if locate("fashion-mnist") is not None:
            data = load("fashion-mnist")
            rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:count]
            x, y = data.rows.take(rows)
            return x.flatten(1).contiguous(), y, "Fashion-MNIST"
    except DataError:
        pass  # a broken copy is `ntkfl data`'s to complain about
    return *synthetic(count), "synthetic images"


def synthetic(count: int, side: int = 28) -> tuple[Tensor, Tensor]:
    """Normalised images of ten classes: x [count, side²], y [count].

    Neighbouring pixels go together and all images share a bright middle, so that the tangent kernel has the one
    huge eigenvalue and the long tail that real images give it: that stiffness decides what the evolution costs.
    """
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(_CLASSES, (count,), generator=generator)
    classes = _smooth(_CLASSES, side, generator)
    middle = torch.hann_window(side + 2, periodic=False)[1:-1]
    shape = classes[y] + 0.6 * _smooth(count, side, generator)
    noise = 0.05 * torch.randn(count, side, side, generator=generator)
    pixels = (1.3 * torch.outer(middle, middle) * (0.5 + 0.5 * shape) + noise).clamp(0, 1).flatten(1)
    return (pixels - pixels.mean()) / pixels.std(), y


def _smooth(count: int, side: int, generator: torch.Generator) -> Tensor:
    coarse = torch.randn(count, 1, 5, 5, generator=generator)
    return F.interpolate(coarse, size=(side, side), mode="bicubic", align_corners=True).squeeze(1)
