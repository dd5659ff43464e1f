"""Choosing hyper-parameters: successive halving on held-out clients, with grids that grow at their edges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ntkfl.compare.spec import Comparison, Entry, whole
from ntkfl.compare.trials import Cell
from ntkfl.errors import ConfigError
from ntkfl.federation.config import build_method
from ntkfl.methods.base import settle

Setting = tuple[tuple[str, float], ...]  # searched options in the grid's order
Grid = Mapping[str, Sequence[float]]
Runner = Callable[[Sequence[Cell]], None]
Scores = dict[Setting, tuple[int, float]]  # the last rung a setting reached, and its score there

_ALL_FAILED = -1.0  # below any accuracy: held-out clients of one class may well score 0


@dataclass
class Chosen:
    """What a search ended with: the options, their score, and every value that was tried.

    The score is the accuracy on held-out clients; `_ALL_FAILED` where every run did, so that nothing was chosen by it.
    """

    options: dict[str, float]
    score: float | None = None
    tried: dict[str, list[float]] = field(default_factory=dict)
    at_edge: list[str] = field(default_factory=list)

    @property
    def nothing(self) -> bool:
        return self.score == _ALL_FAILED


def search(comparison: Comparison, entries: Sequence[Entry], root: Path, run: Runner) -> dict[str, Chosen]:
    """The best setting of every entry. Entries advance together, so that their cells fill all workers.

    Each round of halving tries what is new in the grids; grids whose best value lies at an edge grow beyond it, at most
    `search.extend` times. A final rung, where one is asked for, compares the best few by longer runs.
    """
    searched = {entry.label: entry for entry in entries if entry.grid}
    grids = {label: {k: sorted(v) for k, v in entry.grid.items()} for label, entry in searched.items()}
    scores: dict[str, Scores] = {label: {} for label in searched}
    growing = set(searched)
    for extension in range(comparison.search.extend + 1):
        if not growing:
            break
        fresh = {label: _fresh(grids[label], scores[label]) for label in searched if label in growing}
        _halve(comparison, searched, fresh, scores, root, run)
        for label in list(fresh):
            best = dict(_best(scores[label]))
            beyond = {
                name: [v for v in values if _valid(searched[label], best | {name: v})]
                for name, values in edges_of(best, grids[label]).items()
            }
            last = extension == comparison.search.extend
            if last or scores[label][_best(scores[label])][1] <= 0 or not any(beyond.values()):
                growing.discard(label)
            else:
                grids[label] = {k: sorted({*values, *beyond.get(k, ())}) for k, values in grids[label].items()}
    chosen = {entry.label: Chosen({}) for entry in entries}
    final = _final(comparison, searched, scores, root, run) if searched and comparison.search.final_rounds else {}
    for label, grid in grids.items():
        setting, reached = final.get(label) or (_best(scores[label]), scores[label][_best(scores[label])][1])
        chosen[label] = Chosen(dict(setting), reached, grid, sorted(edges_of(dict(setting), grid)))
    return chosen


def _best(scores: Scores) -> Setting:
    """The setting that went furthest, and of those the one with the highest score."""
    return max(scores, key=lambda setting: scores[setting])


def _final(
    comparison: Comparison, entries: Mapping[str, Entry], scores: Mapping[str, Scores], root: Path, run: Runner
) -> dict[str, tuple[Setting, float]]:
    """The best few settings of each entry at the final rung: what leads early need not lead late."""
    rounds = comparison.search.final_rounds
    assert rounds is not None
    finalists = {
        label: sorted(own, key=lambda s: own[s])[-comparison.search.finalists :]
        for label, own in scores.items()
        if own[_best(own)][1] != _ALL_FAILED
    }
    cells = _cells(comparison, entries, finalists, rounds, root)
    run([cell for own in cells.values() for cell in own])
    means = {where: sum(map(score, own)) / len(own) for where, own in cells.items()}
    found = {}
    for label, settings in finalists.items():
        best = max(settings, key=lambda s: means[label, s])
        found[label] = best, means[label, best]
    return found


def _fresh(grid: Grid, scores: Scores) -> list[Setting]:
    """Settings to try next: all of a grid at first. Of one that has grown those next to its best, every option at most
    one place away: what is far off in one option was far off before the other grew.
    """
    settings = [tuple(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if not scores:
        return settings
    place = {name: {value: i for i, value in enumerate(values)} for name, values in grid.items()}
    best = dict(_best(scores))
    near = [s for s in settings if all(abs(place[k][v] - place[k][best[k]]) <= 1 for k, v in s)]
    return [s for s in near if s not in scores]


def _halve(
    comparison: Comparison,
    entries: Mapping[str, Entry],
    fresh: Mapping[str, list[Setting]],
    scores: dict[str, Scores],
    root: Path,
    run: Runner,
) -> None:
    """Rungs of growing length; the best of each go on. The score kept is that of the last rung a setting reached."""
    going = dict(fresh)
    for rung, rounds in enumerate(comparison.rungs):
        cells = _cells(comparison, entries, going, rounds, root)
        run([cell for own in cells.values() for cell in own])
        for (label, s), own in cells.items():
            # A setting that went further is always ahead of one that was dropped earlier.
            lost = all(cell.failed for cell in own)
            scores[label][s] = rung, _ALL_FAILED if lost else sum(map(score, own)) / len(own)
        for label, settings in going.items():
            keep = max(comparison.search.keep_at_least, math.ceil(len(settings) * comparison.search.keep))
            going[label] = sorted(settings, key=lambda s: -scores[label][s][1])[:keep]


def score(cell: Cell) -> float:
    """Mean accuracy on the held-out clients over the last third of the rounds; 0 where the run failed."""
    records = cell.history()
    if cell.failed or not records:
        return 0.0
    tail = [float(record["validation_accuracy"]) for record in records[-max(1, len(records) // 3) :]]
    return sum(tail) / len(tail)


def _cells(
    comparison: Comparison, entries: Mapping[str, Entry], settings: Mapping[str, list[Setting]], rounds: int, root: Path
) -> dict[tuple[str, Setting], list[Cell]]:
    """The runs of each setting, one a seed: `rounds` long, without the held-out clients, and with no early end."""
    hold_out = comparison.search.hold_out
    assert hold_out is not None  # see `Comparison.with_hold_out`
    changes = {"rounds": rounds, "hold_out": hold_out, "stop_at": None, "byzantine": None}
    return {
        (label, setting): [
            Cell(
                f"{label} ({', '.join(f'{k} {v:g}' for k, v in setting)})",
                comparison.run(entries[label], seed, dict(setting), **changes),
                root,
            )
            for seed in comparison.search.seed
        ]
        for label, own in settings.items()
        for setting in own
    }


def edges_of(best: Mapping[str, float], grid: Grid) -> dict[str, list[float]]:
    """For each option whose best value is the first or last of several: the next value beyond, in the same ratio."""
    beyond: dict[str, list[float]] = {}
    for name, values in grid.items():
        if len(values) < 2:
            continue
        integer = all(float(v).is_integer() for v in values)
        for edge, neighbour in ((values[-1], values[-2]), (values[0], values[1])):
            if best[name] == edge and edge > 0 and neighbour > 0:
                following = _tidy(edge**2 / neighbour, integer)
                if following > 0 and (following - edge) * (edge - neighbour) > 0:  # rounded, it may be zero or the edge
                    beyond[name] = [following]
    return beyond


def _valid(entry: Entry, options: Mapping[str, float]) -> bool:
    """Whether the method takes these values: a grid grows no further than an option's bounds."""
    try:
        given = entry.with_options(options)
        settle(build_method(given["method"]), given["privacy"], given["robust"])
    except ConfigError:
        return False
    return True


def _tidy(value: float, integer: bool) -> float:
    return float(round(float(f"{value:.2g}"))) if integer else float(f"{value:.2g}")


def describe(chosen: Chosen, entry: Entry) -> dict[str, Any]:
    """For the results file: what was fixed, searched and chosen."""
    return {
        "fixed": entry.method,
        "searched": chosen.tried,
        "chosen": {} if chosen.nothing else whole(chosen.options),
        "held_out_score": None if chosen.nothing else chosen.score,
        "still_at_edge": chosen.at_edge,
    }
