"""`ntkfl compare`: many runs, one table."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ntkfl.cli.verbs import stoppable
from ntkfl.compare.results import Row, columns, notes, title, write
from ntkfl.compare.run import carry_out
from ntkfl.compare.spec import Comparison
from ntkfl.compare.trials import Cell, Workers
from ntkfl.progress import percent, plural


def compare(
    config: Annotated[Path, typer.Argument(help="TOML of methods, options, grids and seeds.")],
    out: Annotated[Path | None, typer.Option(help="Folder of runs and results (default runs/NAME).")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Runs at a time (default one per core).")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default cpu).")] = None,
) -> None:
    """Compare methods on equal terms.

    Finished runs are kept and never repeated; an interrupted comparison continues when called again.
    A run that ends in an error leaves the others alone: the summary says where, and the exit code is 1.

    Example: ntkfl compare configs/quickstart.toml
    """
    console = Console(highlight=False, soft_wrap=True)
    comparison, note = Comparison.read(config).prepared()
    if note:
        console.print(note, style="yellow", markup=False)
    folder = out or Path("runs") / comparison.name
    watcher = Watcher(console)

    def planned(waiting: int) -> None:
        if waiting:
            console.print(f"{plural(waiting, 'run')} to do; to watch: ntkfl report --live {folder}")

    again = f"ntkfl compare {config}{f' --out {out}' if out else ''}"
    pool = Workers(workers or min(os.cpu_count() or 1, 16), device, watcher.watch)
    with stoppable(lambda: f"stopped; finished runs are kept, continue with: {again}"), pool, watcher.status:
        rows, searches = carry_out(comparison, folder, pool, planned)
    finished = any(any(row.accuracy) for row in rows)
    if finished:
        write(folder, comparison, rows, searches, shlex.join(["ntkfl", *sys.argv[1:]]))
        console.print(f"\n{title(comparison)}", markup=False)
        for table in tables(comparison, rows):
            with console.capture() as text:
                console.print(table, soft_wrap=False)
            typer.echo("\n".join(line.rstrip() for line in text.get().splitlines()))  # no trailing blanks
    else:
        console.print("no run finished a round")
    for line in notes(comparison, rows, searches):
        console.print(line, markup=False)
    if finished:
        console.print(_pictures(folder, comparison, rows))
    if pool.broken:
        _tell_failures(console, pool.broken)
    if pool.broken or not finished:
        raise typer.Exit(1)


def _pictures(folder: Path, comparison: Comparison, rows: Sequence[Row]) -> str:
    """Draw the curves and write the report; lines on where all is."""
    from ntkfl.report.curves import plot_curves  # plotting is slow to import, and workers need none of it
    from ntkfl.report.page import write_report

    drawn = [row for row in rows if comparison.figure is None or row.label in comparison.figure]
    figure = plot_curves(drawn, title(comparison), comparison.targets, folder / "curves.png")
    page = write_report([folder], folder / "report.html")
    return f"curves:  {figure}\nresults: {folder / 'results.json'}\nreport:  {page}  (open it in a browser)"


def _tell_failures(console: Console, cells: Sequence[Cell]) -> None:
    """Every run that ended in an error; those with the same one together, of which the first says where and how."""
    console.print(f"\n[red]{plural(len(cells), 'run')} failed[/red]; called again, the comparison tries them again")
    for failure in dict.fromkeys(cell.failed for cell in cells):
        alike = [cell for cell in cells if cell.failed == failure]
        names = "; ".join(f"{cell.label}, seed {cell.config.seed}" for cell in alike)
        console.print(f"✗ {names}:\n  {alike[0].error}", markup=False)


def tables(comparison: Comparison, rows: Sequence[Row]) -> list[Table]:
    """Two narrow tables and the settings, so that they fit 80 columns."""
    every = columns(comparison, rows)
    *rest, seconds, settings = every
    by_round = [heading for heading in rest if heading.startswith(("method", "%"))]
    to_target = ["method", *(heading for heading in rest if heading not in by_round)]
    return [
        _table("Test accuracy by round", every, by_round),
        _table("Rounds, and MiB up and down, to a test accuracy", every, to_target),
        _table("Settings, and seconds per round", every, ["method", settings, seconds]),
    ]


def _table(title: str, every: Mapping[str, Sequence[str]], headings: Sequence[str]) -> Table:
    """Some columns: numbers to the right, words to the left."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left", title_style="bold")
    for heading in headings:
        if heading == "method":
            table.add_column(heading, no_wrap=True, max_width=30)
        elif heading == "setting":
            table.add_column(heading, overflow="fold")
        else:
            table.add_column(heading.replace(" to ", "\nto "), justify="right")
    for cells in zip(*(every[heading] for heading in headings), strict=True):
        table.add_row(*map(escape, cells))
    return table


class Watcher:
    """A line for every run that ends, and inside of `status`, in a terminal, how many have."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.status = console.status("")
        # By folder and length, as a search goes on with a run: each has its line, and its files are not read again.
        self.ended: set[tuple[Path, int]] = set()

    def watch(self, cells: Sequence[Cell]) -> None:
        """Say which of these runs ended since the last call."""
        runs = {(cell.folder.path, cell.config.rounds): cell for cell in cells}
        every = len(self.ended | runs.keys())  # earlier stages count too: their lines stand above
        for run in runs.keys() - self.ended:
            if runs[run].finished or runs[run].failed:
                self.ended.add(run)
                how_far = "" if self.console.is_terminal else f"  ({len(self.ended)} of {every} runs finished)"
                self.console.print(_line(runs[run]) + how_far, soft_wrap=True, markup=False)
        self.status.update(f"{len(self.ended)} of {every} runs finished")


def _line(cell: Cell) -> str:
    """How a run ended. One of a search never shows the test set."""
    if cell.failed:
        return f"✗ {cell.label}, seed {cell.config.seed}: {cell.failed}"
    last = cell.history()[-1]
    accuracy, on = last["test_accuracy"], ""
    if "validation_accuracy" in last:
        accuracy, on = last["validation_accuracy"], " on held-out clients"
    return f"✓ {cell.label}, seed {cell.config.seed}: {percent(accuracy)}{on} after {plural(last['round'], 'round')}"
