"""`ntkfl reproduce`: the paper's figures, tables and statements, one command each."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ntkfl.cli.verbs import stoppable
from ntkfl.devices import find_device
from ntkfl.errors import unknown
from ntkfl_experiments.paper import ITEMS
from ntkfl_experiments.paper.item import SCALES, VERDICTS, Context, Findings, Scale, folder_of, judge_again, write


def reproduce(
    name: Annotated[str | None, typer.Argument(help=f"all, or one of {', '.join(ITEMS)}.")] = None,
    scale: Annotated[str, typer.Option(help="quick: minutes on two cores; full: the paper's setting.")] = "quick",
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default cpu).")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Runs at a time (default one per core).")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of results (default --runs; results/paper for the full scale).")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder that keeps finished work.")] = Path("runs/paper"),
    judge: Annotated[bool, typer.Option("--judge", help="Judge stored results again, and run nothing.")] = False,
) -> None:
    """The paper's figures, tables and theorems: work one out, and say which claims hold.

    Finished runs are kept and never repeated; an interrupted call continues when called again.

    Example: ntkfl reproduce fig4c --scale full --device cuda
    """
    console = Console(highlight=False)
    if name is None:
        for item in ITEMS.values():
            typer.echo(f"{item.name:10} {item.title}")
        return
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    if name != "all" and name not in ITEMS:
        raise unknown("item", name, (*ITEMS, "all"))
    if device is not None:
        find_device(device)
    chosen: Scale = "full" if scale == "full" else "quick"
    results = out or (Path("results/paper") if chosen == "full" else runs)  # a quick look leaves what is tracked alone
    hint = f"stopped; finished work is kept, continue with: {shlex.join(['ntkfl', *sys.argv[1:]])}"
    for item in ITEMS.values() if name == "all" else [ITEMS[name]]:
        folder, began = folder_of(results, item.name, chosen), time.perf_counter()
        if judge:
            found = judge_again(folder, item)
        else:
            console.print(f"{item.name}: {item.title}", soft_wrap=True)
            at_a_time = workers or min(os.cpu_count() or 1, 16)
            with stoppable(lambda: hint):
                outcome = item.run(Context(chosen, runs / chosen / item.name, device, at_a_time, quiet=False))
            found = write(folder, item, outcome, chosen, time.perf_counter() - began)
        console.print(_table(found), f"{item.name}: {folder / 'figure.png'}, result.json, findings.md", soft_wrap=True)
        if chosen == "quick":
            kept = f"results/paper/{item.name}/findings.md"
            console.print(f"this was a quick look: verdicts of the full scale are in {kept}", soft_wrap=True)
        console.print(f"{time.perf_counter() - began:.0f} s\n")


def _table(found: Findings) -> Table:
    claims, beside = found
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("claim", "the paper", "here", ""):
        table.add_column(heading, overflow="fold")
    for f in claims:
        table.add_row(f.claim, f.paper, f"{f.ours}; {f.note}" if f.note else f.ours, VERDICTS[f.holds])
    for b in beside:
        table.add_row(b.what, "not claimed", b.found, "")
    return table
