"""What a suite is asked and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Setting:
    """How to run a suite. `quick` takes sizes that end in seconds and say nothing about speed."""

    quick: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True)
class BenchRow:
    """One way of doing a thing, timed.

    `ratio` is its time over ours; 1 begins a comparison, None is beside any. `flop` counts the matrix
    products of the plain way to do it, where they are most of the work. `difference` is the relative distance of its
    result from ours.
    """

    what: str
    seconds: float
    ratio: float | None = None
    goal: float | None = None
    flop: float | None = None
    difference: float | None = None
    note: str = ""
    details: dict[str, float] = field(default_factory=dict)
    ours: bool = False


Suite = Callable[[Setting], list[BenchRow]]
