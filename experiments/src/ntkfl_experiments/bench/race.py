"""Timing several ways to do one thing so that other work on the machine hits all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ntkfl_experiments.bench.rows import Setting

TURN_SECONDS = 0.3


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, and what the last call returned."""

    seconds: float
    result: Any


def race(
    ways: Mapping[str, Callable[[], Any]], turns: int, setting: Setting, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Timing]:
    """The best of `turns` turns of each way by the `clock`, taken alternately; the first turn keeps the order given.

    A turn repeats a short way for a while and takes the mean, as a long way does within a single call: otherwise the
    short one alone could slip into a quiet moment of the machine.
    """
    names, least = list(ways), 0.0 if setting.quick else TURN_SECONDS
    best = dict.fromkeys(names, float("inf"))
    results: dict[str, Any] = {}
    for turn in range(1 if setting.quick else turns):
        for name in _rotated(names, turn):
            seconds, results[name] = _turn(ways[name], least, setting.device, clock)
            best[name] = min(best[name], seconds)
    return {name: Timing(best[name], results[name]) for name in names}


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    exact = b.double()
    return float((a.double() - exact).norm() / exact.norm())


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


def _rotated(names: list[str], turn: int) -> list[str]:
    at = turn % len(names)
    return names[at:] + names[:at]


def finish(device: torch.device) -> None:
    """A GPU works behind Python's back."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
