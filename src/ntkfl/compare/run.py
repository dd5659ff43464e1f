"""A comparison carried out: settings searched on held-out clients, then every run, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ntkfl.compare.plan import planned_cells, write_plan
from ntkfl.compare.results import Row, summarise
from ntkfl.compare.search import describe, search
from ntkfl.compare.spec import Comparison
from ntkfl.compare.trials import Cell, Workers
from ntkfl.federation.run_folder import RunFolder

Searches = dict[str, dict[str, Any]]


def carry_out(
    comparison: Comparison,
    folder: Path,
    pool: Workers,
    watch: Callable[[Sequence[Cell]], None],
    planned: Callable[[int], None] = lambda _: None,
) -> tuple[list[Row], Searches]:
    """The rows in the entries' order, and what each search found. Finished runs under `folder` are taken as they are.
    Settings are searched on `comparison.search.hold_out` clients, or on a share of them where that is not said. An
    entry whose search chose nothing is not run.

    `watch` sees the cells about twice a second; `planned` is told how many runs are left once settings are chosen.
    """

    def run(cells: Sequence[Cell]) -> None:
        pool.run(cells, watch)

    # Held by one: another comparison here would meet this one's runs half done.
    comparison = comparison.with_hold_out()
    with RunFolder(folder).locked():
        chosen = search(comparison, comparison.methods, folder / "search", run)
        cells = planned_cells(comparison, chosen, folder / "cells")
        every = [cell for label, own in cells.items() for cell in own if not chosen[label].nothing]
        write_plan(folder, comparison, every)
        planned(len({cell.key for cell in every if not cell.finished}))
        run(every)
    searches = {entry.label: describe(chosen[entry.label], entry) for entry in comparison.methods}
    rows = [
        summarise(
            comparison,
            label,
            {**searches[label]["fixed"], **searches[label]["chosen"]},
            own,
            unchosen=chosen[label].nothing,
        )
        for label, own in cells.items()
    ]
    return rows, searches
