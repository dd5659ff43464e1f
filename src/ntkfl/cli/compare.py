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
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ntkfl.cli.stopping import stoppable
from ntkfl.compare.results import Row, columns, row_settings, search_lines, write
from ntkfl.compare.run import carry_out
from ntkfl.compare.settings import title
from ntkfl.compare.spec import Comparison
from ntkfl.compare.trials import Cell, Workers
from ntkfl.progress import percent, plural


def compare(
    config: Annotated[Path, typer.Argument(help="a TOML that lists methods, options, grids and seeds")],
    out: Annotated[Path | None, typer.Option(help="folder of runs and results (default runs/NAME)")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="runs at a time (default one per core)")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda")] = None,
) -> None:
    """Compare methods on equal terms.

    Finished runs are kept and never repeated; an interrupted comparison continues when called again.
    A run that ends in an error leaves the others alone: the summary says where, and the exit code is 1.

    Example: ntkfl compare configs/quickstart.toml
    """
    console = Console(highlight=False, soft_wrap=True)
    comparison, note = Comparison.read(config).with_available_data()
    if note:
        console.print(f"[yellow]{note}[/yellow]")
    comparison = comparison.with_hold_out()
    folder = out or Path("runs") / comparison.name
    watcher = Watcher(console)
    began = time.perf_counter()

    def planned(waiting: int) -> None:
        if waiting:
            runs, left = plural(waiting, "run"), "them" if waiting > 1 else "it"
            console.print(f"{runs} to do; to see {left} go: ntkfl report --live {folder}")

    again = f"ntkfl compare {config}{f' --out {out}' if out else ''}"
    hint = f"stopped; finished runs are kept, continue with: {again}"
    pool = Workers(workers or min(os.cpu_count() or 1, 16), device)
    with stoppable(lambda: hint), pool, watcher:
        rows, searches = carry_out(comparison, folder, pool, watcher.watch, planned)
    from ntkfl.report.curves import plot_curves  # plotting is slow to import, and workers need none of it
    from ntkfl.report.page import write_report

    finished = any(any(row.accuracy) for row in rows)
    if finished:
        write(folder, comparison, rows, searches, shlex.join(["ntkfl", *sys.argv[1:]]))
        drawn = [row for row in rows if comparison.figure is None or row.label in comparison.figure]
        figure = plot_curves(drawn, title(comparison), comparison.targets, folder / "curves.png")
        for heading, table in tables(comparison, rows):
            console.print(f"\n[bold]{heading}[/bold]")
            with console.capture() as text:
                console.print(table, soft_wrap=False)
            lines = [line.rstrip() for line in text.get().splitlines()]  # a log keeps no trailing blanks
            typer.echo("\n".join(lines).strip("\n"))
        typer.echo()
    else:
        console.print("no run finished a round")
    for line in search_lines(comparison, searches):
        console.print(line, markup=False)
    if finished:
        console.print(f"{time.perf_counter() - began:.0f} s in all")
        console.print(f"curves:  {figure}\nresults: {folder / 'results.json'}")
        console.print(f"report:  {write_report([folder], folder / 'report.html')}  (open it in a browser)")
    if pool.broken:
        _tell_failures(console, pool.broken)
    if pool.broken or not finished:
        raise typer.Exit(1)


def _tell_failures(console: Console, cells: Sequence[Cell]) -> None:
    """Every run that ended in an error; those with the same one together, of which the first says where and how."""
    console.print(f"\n[red]{plural(len(cells), 'run')} failed[/red]; called again, the comparison tries them again")
    for failure in dict.fromkeys(cell.failed for cell in cells):
        alike = [cell for cell in cells if cell.failed == failure]
        names = "; ".join(f"{cell.label}, seed {cell.config.seed}" for cell in alike)
        console.print(f"✗ {names}:\n  {alike[0].error}", markup=False)


def tables(comparison: Comparison, rows: Sequence[Row]) -> list[tuple[str, Table]]:
    """Two narrow tables and the settings, each under a heading, so that they fit 80 columns."""
    headers, body = columns(comparison, rows)
    shown = sum(header.startswith("%") for header in headers)
    parts = [
        (f"Test accuracy by round[/bold]\n{title(comparison)}[bold]", range(1, 1 + shown)),
        ("Rounds, and MiB up and down, to a test accuracy", range(1 + shown, len(headers) - 1)),
    ]
    tables = []
    for heading, chosen in parts:
        table = _table()
        for i in chosen:
            table.add_column(headers[i].replace(" to ", "\nto "), justify="right")
        for cells in body:
            table.add_row(escape(cells[0]), *(cells[i] for i in chosen))
        tables.append((heading, table))
    settings = _table()
    settings.add_column("options", overflow="fold")
    settings.add_column("seconds", justify="right")
    for text, cells in zip(row_settings(comparison, rows), body, strict=True):
        settings.add_row(escape(cells[0]), escape(text), cells[-1])
    return [*tables, ("Settings, and seconds per round", settings)]


def _table() -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True, max_width=30)
    return table


class Watcher:
    """A line for every run that ends, and how many have: a line that is written over in a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.status = console.status("")
        # By folder and length, as a search goes on with a run: each has its line, and its files are not read again.
        self.ended: set[tuple[Path, int]] = set()

    def __enter__(self) -> None:
        if self.console.is_terminal:
            self.status.start()

    def __exit__(self, *_: object) -> None:
        self.status.stop()

    def watch(self, cells: Sequence[Cell]) -> None:
        runs = {(cell.folder.path, cell.config.rounds): cell for cell in cells}
        every = len(self.ended | runs.keys())  # earlier stages count too: their lines stand above
        for run in runs.keys() - self.ended:
            if runs[run].finished or runs[run].failed:
                self.ended.add(run)
                how_far = "" if self.console.is_terminal else f"  ({len(self.ended)} of {every} runs finished)"
                self.console.print(_line(runs[run]) + how_far, soft_wrap=True, markup=False)
        self.status.update(f"{len(self.ended)} of {every} runs finished")


def _line(cell: Cell) -> str:
    if cell.failed:
        return f"✗ {cell.label}, seed {cell.config.seed}: {cell.failed}"
    last = cell.history()[-1]
    rounds = plural(last["round"], "round")
    what = f"{percent(last['test_accuracy'], 2)} after {rounds}"
    if "validation_accuracy" in last:  # a search never shows the test set
        what = f"{percent(last['validation_accuracy'], 2)} on held-out clients after {rounds}"
    return f"✓ {cell.label}, seed {cell.config.seed}: {what}, {cell.seconds():.1f} s"
