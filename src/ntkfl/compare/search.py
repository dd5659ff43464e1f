"""Choosing hyper-parameters: successive halving on held-out clients (Jamieson and Talwalkar, AISTATS 2016)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ntkfl.compare.spec import Comparison, Entry, whole
from ntkfl.compare.trials import Cell

Setting = tuple[tuple[str, float], ...]  # searched options in the grid's order
Runner = Callable[[Sequence[Cell]], None]


@dataclass
class Chosen:
    """What a search ended with: the options, their accuracy on held-out clients, every value tried, and the options
    whose best value is the first or last of several. `score` is None where every run failed, or nothing was searched.
    """

    options: dict[str, float]
    score: float | None = None
    tried: dict[str, list[float]] = field(default_factory=dict)
    at_edge: list[str] = field(default_factory=list)

    @property
    def nothing(self) -> bool:
        """Whether every run of the search failed, so that nothing was chosen by it."""
        return bool(self.tried) and self.score is None


def search(comparison: Comparison, entries: Sequence[Entry], root: Path, run: Runner) -> dict[str, Chosen]:
    """The best setting of every entry, by its label. Runs are kept under `root`.

    All settings of a grid run for the first rung's rounds; the best part `keep` of each entry goes on to the next,
    longer rung; the best of the last rung is chosen. Entries advance together, so that their runs fill all workers.
    """
    chosen = {entry.label: Chosen({}) for entry in entries}
    searched = {entry.label: entry for entry in entries if entry.grid}
    going: dict[str, list[Setting]] = {
        label: [tuple(zip(entry.grid, values, strict=True)) for values in itertools.product(*entry.grid.values())]
        for label, entry in searched.items()
    }
    for rounds in comparison.rungs:
        cells = {
            (label, setting): _cells(comparison, searched[label], setting, rounds, root)
            for label, settings in going.items()
            for setting in settings
        }
        run([cell for own in cells.values() for cell in own])
        for label, settings in going.items():
            scores = {setting: sum(map(score, cells[label, setting])) for setting in settings}
            best = sorted(settings, key=lambda setting: -scores[setting])
            tried = {name: sorted(values) for name, values in searched[label].grid.items()}
            failed = all(cell.failed for setting in settings for cell in cells[label, setting])
            own = dict(best[0])
            edge = sorted(k for k, values in tried.items() if len(values) > 1 and own[k] in (values[0], values[-1]))
            mean = scores[best[0]] / len(comparison.search.seed)
            chosen[label] = Chosen(own, None if failed else mean, tried, edge)
            keep = max(comparison.search.keep_at_least, math.ceil(len(best) * comparison.search.keep))
            going[label] = best[:keep]
    return chosen


def score(cell: Cell) -> float:
    """Mean accuracy on the held-out clients over the last third of the rounds; −1, below any, where the run failed."""
    records = cell.history()
    if cell.failed or not records:
        return -1.0
    tail = [float(record["validation_accuracy"]) for record in records[-max(1, len(records) // 3) :]]
    return sum(tail) / len(tail)


def _cells(comparison: Comparison, entry: Entry, setting: Setting, rounds: int, root: Path) -> list[Cell]:
    """A setting's runs, one per seed: without the held-out clients, among honest clients, and with no early end."""
    assert comparison.search.hold_out is not None  # see `Comparison.with_hold_out`
    changes = {"rounds": rounds, "hold_out": comparison.search.hold_out, "stop_at": None, "byzantine": None}
    label = f"{entry.label} ({', '.join(f'{name} {value:g}' for name, value in setting)})"
    configs = (comparison.run(entry, seed, dict(setting), **changes) for seed in comparison.search.seed)
    return [Cell(label, config, root) for config in configs]


def describe(chosen: Chosen, entry: Entry) -> dict[str, Any]:
    """For the results file: what was fixed, searched and chosen."""
    return {
        "fixed": entry.method,
        "searched": chosen.tried,
        "chosen": {} if chosen.nothing else whole(chosen.options),
        "held_out_score": chosen.score,
        "still_at_edge": chosen.at_edge,
    }
