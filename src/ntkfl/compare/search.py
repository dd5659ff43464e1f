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
from ntkfl.federation.run_folder import Record
from ntkfl.methods.combinations import settle

Setting = tuple[tuple[str, float], ...]  # searched options in the grid's order
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
    """The best setting of every entry. Entries advance together, so that their cells fill all workers."""
    chosen = {entry.label: Chosen({}) for entry in entries}
    open_entries = {entry.label: entry for entry in entries if entry.grid}
    grids = {label: {k: sorted(v) for k, v in entry.grid.items()} for label, entry in open_entries.items()}
    scores: dict[str, Scores] = {label: {} for label in open_entries}
    for extension in range(comparison.search.extend + 1):
        fresh = {label: _fresh(grids[label], scores[label]) for label in open_entries}
        _halve(comparison, open_entries, fresh, scores, root, run)
        still = {}
        for label, entry in open_entries.items():
            best = max(scores[label], key=lambda s: scores[label][s])
            edges = edges_of(dict(best), grids[label])
            reached = scores[label][best][1]
            chosen[label] = Chosen(dict(best), reached, grids[label], sorted(edges))
            if edges and reached > 0 and extension < comparison.search.extend:
                beyond = {k: [v for v in values if _valid(entry, dict(best) | {k: v})] for k, values in edges.items()}
                if any(beyond.values()):
                    grids[label] = {k: sorted({*values, *beyond.get(k, ())}) for k, values in grids[label].items()}
                    still[label] = entry
        open_entries = still
        if not open_entries:
            break
    if comparison.search.final_rounds is not None:
        _final(comparison, [entry for entry in entries if entry.grid], scores, chosen, root, run)
    return chosen


def _final(
    comparison: Comparison,
    entries: Sequence[Entry],
    scores: Mapping[str, Scores],
    chosen: dict[str, Chosen],
    root: Path,
    run: Runner,
) -> None:
    """The best few settings of each entry at the final rung: what leads early need not lead late."""
    rounds = comparison.search.final_rounds
    assert rounds is not None
    cells = {
        (entry.label, s): [_cell(comparison, entry, s, seed, rounds, root) for seed in comparison.search.seed]
        for entry in entries
        if not chosen[entry.label].nothing
        for s in sorted(scores[entry.label], key=lambda s: scores[entry.label][s])[-comparison.search.finalists :]
    }
    run([cell for own in cells.values() for cell in own])
    for label in dict.fromkeys(label for label, _ in cells):
        final = {s: sum(map(score, own)) / len(own) for (owner, s), own in cells.items() if owner == label}
        best = max(final, key=lambda s: final[s])
        grid = chosen[label].tried
        chosen[label] = Chosen(dict(best), final[best], grid, sorted(edges_of(dict(best), grid)))


def _fresh(grid: Mapping[str, Sequence[float]], scores: Scores) -> list[Setting]:
    """Settings to try next: all of a grid at first. Of one that has grown those next to its best, every option at most
    one place away: what is far off in one option was far off before the other grew.
    """
    settings = [s for s in _settings(grid) if s not in scores]
    if not scores:
        return settings
    best = max(scores, key=lambda s: scores[s])
    place = {name: {value: i for i, value in enumerate(values)} for name, values in grid.items()}
    return [
        s for s in settings if all(abs(place[k][v] - place[k][b]) <= 1 for (k, v), (_, b) in zip(s, best, strict=True))
    ]


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
        cells = {
            (label, s): [_cell(comparison, entries[label], s, seed, rounds, root) for seed in comparison.search.seed]
            for label in going
            for s in going[label]
        }
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
    tail = records[-max(1, len(records) // 3) :]
    return sum(_validation(r) for r in tail) / len(tail)


def _validation(record: Record) -> float:
    return float(record["validation_accuracy"])


def _cell(comparison: Comparison, entry: Entry, setting: Setting, seed: int, rounds: int, root: Path) -> Cell:
    hold_out = comparison.search.hold_out
    assert hold_out is not None  # see `Comparison.with_hold_out`
    config = comparison.run(entry, seed, dict(setting), rounds=rounds, hold_out=hold_out, stop_at=None)
    text = ", ".join(f"{k} {v:g}" for k, v in setting)
    return Cell(f"{entry.label} ({text})", config, root)


def _settings(grid: Mapping[str, Sequence[float]]) -> list[Setting]:
    return [tuple(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def edges_of(best: Mapping[str, float], grid: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
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
