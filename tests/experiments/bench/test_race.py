"""Fair timing: turns alternate, every way gets as many, and the best counts."""

from __future__ import annotations

import itertools

import pytest
import torch
from ntkfl_experiments.bench import Setting
from ntkfl_experiments.bench import race as module
from ntkfl_experiments.bench.race import race, relative


def test_turns_alternate_and_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_SECONDS", 0.0)
    order: list[str] = []
    race({name: lambda name=name: order.append(name) for name in "abc"}, 3, Setting())  # type: ignore[misc]
    assert "".join(order) == "abcbcacab"


def test_best_turn_of_means(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    ticks = iter([0, 2, 4, 10, 11, 14])  # two calls in 4 s, then two in 4 s; the clock is read once more at a start
    monkeypatch.setattr(module, "TURN_SECONDS", 3.0)
    timed = race({"a": lambda: next(calls)}, 2, Setting(), clock=lambda: next(ticks))["a"]
    assert timed.seconds == 2.0
    assert timed.result == 3


def test_quick_calls_once() -> None:
    calls: list[int] = []
    race({"a": lambda: calls.append(1)}, 5, Setting(quick=True))
    assert len(calls) == 1


def test_relative() -> None:
    assert relative(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
