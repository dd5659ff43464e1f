"""`ntkfl compare`: many runs, one table."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ntkfl.compare.cells import Cell, run_cells
from ntkfl.compare.results import Row, accuracy_at, reached_text, spread, summarise, write
from ntkfl.compare.search import describe, search
from ntkfl.compare.spec import Comparison


def compare(
    config: Annotated[Path, typer.Argument(help="a TOML that lists methods, options, grids and seeds")],
    out: Annotated[Path | None, typer.Option(help="folder of runs and results [default: runs/NAME]")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="runs at a time [default: one a core]")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda")] = None,
) -> None:
    """Compare methods on equal terms.

    Finished runs are kept and never repeated; an interrupted comparison continues when called again.

    Example: ntkfl compare configs/quickstart.toml
    """
    console = Console(highlight=False)
    comparison, note = Comparison.read(config).with_available_data()
    if note:
        console.print(f"[yellow]{note}[/yellow]", soft_wrap=True)
    folder = out or Path("runs") / comparison.name
    count = workers or min(os.cpu_count() or 1, 16)
    watcher = _Watcher(console)

    def run(cells: Sequence[Cell]) -> None:
        with watcher:
            run_cells(cells, count, device, watcher.watch)

    began = time.perf_counter()
    try:
        chosen = search(comparison, comparison.methods, folder / "search", run)
        cells = {
            entry.label: [
                Cell(entry.label, comparison.run(entry, seed, chosen[entry.label].options), folder / "cells")
                for seed in comparison.seeds
            ]
            for entry in comparison.methods
        }
        run([cell for own in cells.values() for cell in own])
    except KeyboardInterrupt:
        console.print(f"stopped; finished runs are kept, continue with: ntkfl compare {config}", soft_wrap=True)
        raise typer.Exit(130) from None
    searches = {entry.label: describe(chosen[entry.label], entry) for entry in comparison.methods}
    rows = [
        summarise(comparison, label, {**searches[label]["fixed"], **searches[label]["chosen"]}, own)
        for label, own in cells.items()
    ]
    from ntkfl.report.curves import plot_curves  # plotting is slow to import, and workers need none of it

    write(folder, comparison, rows, searches, shlex.join(["ntkfl", *sys.argv[1:]]))
    figure = plot_curves(rows, _title(comparison), comparison.targets, folder / "curves.png")
    for table in (_accuracy_table(comparison, rows), _target_table(comparison, rows)):
        console.print(table)
    for row in rows:
        for seed, why in zip(row.seeds, row.failed, strict=True):
            if why:
                console.print(f"{row.label}, seed {seed}: {why}", soft_wrap=True)
    console.print(f"{time.perf_counter() - began:.0f} s in all", soft_wrap=True)
    console.print(f"curves:  {figure}\nresults: {folder / 'results.json'}, {folder / 'results.csv'}", soft_wrap=True)


def _title(comparison: Comparison) -> str:
    data = comparison.data
    split = f"Dirichlet α = {data.alpha:g}" if data.partition == "dirichlet" else data.partition
    seeds = f"{len(comparison.seeds)} seeds" if len(comparison.seeds) > 1 else f"seed {comparison.seeds[0]}"
    return f"{data.dataset}, {data.clients} clients ({split}), {comparison.clients_per_round} a round, {seeds}"


def _accuracy_table(comparison: Comparison, rows: Sequence[Row]) -> Table:
    longest = max(len(curve) for row in rows for curve in row.accuracy)
    shown = [r for r in comparison.show_rounds if r <= longest]
    table = Table(title=f"Test accuracy, %: {_title(comparison)}", title_justify="left")
    table.add_column("method", overflow="fold")
    for r in shown:
        table.add_column(f"round {r}", justify="right")
    table.add_column("setting", overflow="fold")
    for row in rows:
        options = ", ".join(f"{k} {v}" for k, v in row.setting.items() if k != "name")
        table.add_row(row.label, *(accuracy_at(row, r) for r in shown), options or "defaults")
    return table


def _target_table(comparison: Comparison, rows: Sequence[Row]) -> Table:
    table = Table(title="Rounds, uplink and seconds", title_justify="left")
    table.add_column("method", overflow="fold")
    for target in comparison.targets:
        table.add_column(f"rounds to {target:.0%}", justify="right")
        table.add_column(f"MiB to {target:.0%}", justify="right")
    table.add_column("seconds a round", justify="right")
    for row in rows:
        cells = []
        for reached in row.reached:
            cells += [reached_text(reached, row.length), spread(reached.uplink_mib)]
        each = [s[-1] / len(s) for s in row.seconds if s]
        table.add_row(row.label, *cells, spread(each, 2))
    return table


class _Watcher:
    """Shows how far every unfinished run is: a live table in a terminal, a line per finished run in a log."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live: Live | None = None
        self.announced: set[str] = set()

    def __enter__(self) -> None:
        if self.console.is_terminal:
            self.live = Live(console=self.console, transient=True, refresh_per_second=2)
            self.live.start()

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()
            self.live = None

    def watch(self, cells: Sequence[Cell]) -> None:
        unique = {cell.key: cell for cell in cells}
        going = []
        for key, cell in unique.items():
            history = cell.history()
            if cell.finished:
                if key not in self.announced:
                    self.announced.add(key)
                    self.console.print(_line(cell), soft_wrap=True)
            elif history:
                going.append((cell, history))
        if self.live:
            done = sum(cell.finished for cell in unique.values())
            table = Table(box=None, title=f"{done} of {len(unique)} runs finished", title_justify="left")
            for cell, history in going:
                bar = "━" * round(24 * len(history) / cell.config.rounds)
                table.add_row(
                    cell.label,
                    f"seed {cell.config.seed}",
                    f"[cyan]{bar:<24}",
                    f"{len(history)}/{cell.config.rounds}",
                    f"{history[-1]['test_accuracy']:.1%}",
                )
            self.live.update(table)


def _line(cell: Cell) -> str:
    if cell.failed:
        return f"✗ {cell.label}, seed {cell.config.seed}: {cell.failed}"
    last = cell.history()[-1]
    what = f"{last['test_accuracy']:.4f} after {last['round']} rounds"
    if "validation_accuracy" in last:  # a search never shows the test set
        what = f"{last['validation_accuracy']:.4f} on held-out clients after {last['round']} rounds"
    return f"✓ {cell.label}, seed {cell.config.seed}: {what}, {cell.seconds():.1f} s"
