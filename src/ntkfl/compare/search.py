"""Choosing hyper-parameters: successive halving on held-out clients (Jamieson and Talwalkar, AISTATS 2016)."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ntkfl.compare.spec import Comparison, Entry
from ntkfl.compare.trials import Cell

Setting = tuple[tuple[str, float], ...]  # searched options in the grid's order


def in_words(setting: Setting) -> str:
    """'lr 0.1, local_steps 20'."""
    return ", ".join(f"{name} {value:g}" for name, value in setting)


@dataclass
class Chosen:
    """What the search of an entry ended with: of every setting the rounds it was tried for and its accuracy on held-out
    clients (None where a run failed); and the best one, empty where every one failed or nothing was searched.
    """

    entry: Entry
    scores: dict[Setting, tuple[int, float | None]] = field(default_factory=dict)
    best: Setting = ()

    @property
    def nothing(self) -> bool:
        """Whether every setting failed, so that nothing was chosen."""
        return bool(self.entry.grid) and not self.best

    @property
    def at_edge(self) -> list[str]:
        """Options whose best value is the least or the largest of several."""
        grid = self.entry.grid
        ends = {name: (min(values), max(values)) for name, values in grid.items() if len(values) > 1}
        return sorted(name for name, value in self.best if value in ends.get(name, ()))

    def dump(self) -> dict[str, Any]:
        """For the results file: what was chosen, and every point of the grid."""
        points = self.scores.items()
        return {
            "chosen": dict(self.best),
            "still_at_edge": self.at_edge,
            "scores": [{"setting": dict(point), "rounds": rounds, "score": score} for point, (rounds, score) in points],
        }


Searches = dict[str, Chosen]  # by the label of the entry


def search(comparison: Comparison, root: Path, run: Callable[[Sequence[Cell]], None]) -> Searches:
    """The best setting of every entry, by its label. Runs are kept under `root`.

    All settings of a grid run for the first rung's rounds; the best part `keep` of each entry goes on to the next,
    longer rung; the best of the last rung is chosen. Entries advance together, so that their runs fill all workers.
    """
    chosen = {entry.label: Chosen(entry) for entry in comparison.entries}
    going: dict[str, list[Setting]] = {
        entry.label: [tuple(zip(entry.grid, values, strict=True)) for values in itertools.product(*entry.grid.values())]
        for entry in comparison.entries
        if entry.grid
    }
    for rounds in comparison.rungs:
        cells = {
            (label, setting): _cells(comparison, chosen[label].entry, setting, rounds, root)
            for label, settings in going.items()
            for setting in settings
        }
        run([cell for own in cells.values() for cell in own])
        for label, settings in going.items():
            scores = {setting: score(cells[label, setting]) for setting in settings}
            settings.sort(key=lambda setting: -1 if (own := scores[setting]) is None else own, reverse=True)
            chosen[label].best = () if scores[settings[0]] is None else settings[0]
            chosen[label].scores |= {setting: (rounds, scores[setting]) for setting in settings}
            del settings[max(comparison.search.keep_at_least, math.ceil(len(settings) * comparison.search.keep)) :]
    return chosen


def score(cells: Sequence[Cell]) -> float | None:
    """Mean accuracy on held-out clients over the last third of rounds, over a setting's runs; None where one failed."""
    means = []
    for cell in cells:
        curve = [record["validation_accuracy"] for record in cell.history()]
        if cell.failed or not curve:
            return None
        means.append(statistics.fmean(curve[-max(1, len(curve) // 3) :]))
    return statistics.fmean(means)


def _cells(comparison: Comparison, entry: Entry, setting: Setting, rounds: int, root: Path) -> list[Cell]:
    """A setting's runs, one per seed: without the held-out clients, among honest clients, and with no early end."""
    changes = {"rounds": rounds, "hold_out": comparison.search.hold_out, "stop_at": None, "byzantine": None}
    label = f"{entry.label} ({in_words(setting)})"
    configs = (comparison.run(entry, seed, dict(setting), **changes) for seed in comparison.search.seed)
    return [Cell(label, config, root) for config in configs]
