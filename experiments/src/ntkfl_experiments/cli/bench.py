"""`ntkfl bench`: how fast this package is on this machine, beside the alternatives."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ntkfl.cli.verbs import stoppable
from ntkfl.devices import find_device
from ntkfl.errors import ConfigError, unknown
from ntkfl.progress import ProgressBar, span
from ntkfl_experiments.bench import SECONDS, SUITES, BenchRow, Setting
from ntkfl_experiments.bench.chart import chart
from ntkfl_experiments.bench.machine import look, matrix_gflops
from ntkfl_experiments.bench.table import document, table, write_json


def bench(
    suites: Annotated[list[str] | None, typer.Argument(help=f"{', '.join(SUITES)}; all if none is named.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write machine, versions and rows there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the rows there, e.g. bench.png.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: does it run? Says nothing about speed.")] = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda where there is one.")] = "cpu",
) -> None:
    """Time this package beside the alternatives, on this machine.

    Example: ntkfl bench round --plot bench.png
    """
    names = list(dict.fromkeys(suites or SUITES))
    for name in names:
        if name not in SUITES:
            raise unknown("bench suite", name, SUITES)
    for path in (json, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {path.absolute().parent}")
    setting = Setting(quick, find_device(device))
    console = Console()
    done: dict[str, list[BenchRow]] = {}
    expected = sum(SECONDS[name] for name in names)
    if not quick:
        console.print(f"about {span(expected)} on two quiet cores", highlight=False)
    with stoppable(lambda: "stopped; nothing was written"), ProgressBar(expected) as bar:
        bar.begin("measuring the machine", 0)  # it says nothing about how long the suites take
        machine = look(setting)
        for line in machine.lines:
            console.print(line, highlight=False)
        for name in names:
            bar.begin(name, SECONDS[name])
            done[name] = SUITES[name](setting)
            # The peak again: a machine with other work shows its best only now and then.
            machine = machine.at_least(matrix_gflops(setting))
            title = (SUITES[name].__doc__ or name).splitlines()[0]
            console.print()
            console.print(table(f"{name}: {title}", done[name], machine), highlight=False)
    if json is not None:
        write_json(json, document(["ntkfl", *sys.argv[1:]], quick, machine, done))
        typer.echo(f"wrote {json}")
    if plot is not None:
        chart(plot, done)
        typer.echo(f"wrote {plot}")
