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
from ntkfl.progress import ProgressBar
from ntkfl_experiments.bench import SUITES, BenchRow, Setting
from ntkfl_experiments.bench.report import machine, table, write_json


def bench(
    suites: Annotated[list[str] | None, typer.Argument(help=f"{', '.join(SUITES)}; all if none is named.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write machine, versions and rows there.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: does it run? Says nothing about speed.")] = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda where there is one.")] = "cpu",
) -> None:
    """Time this package beside the alternatives, on this machine.

    Example: ntkfl bench kernel clients --json bench.json
    """
    names = list(dict.fromkeys(suites or SUITES))
    for name in names:
        if name not in SUITES:
            raise unknown("bench suite", name, SUITES)
    if json is not None and not json.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {json}: there is no folder {json.absolute().parent}")
    setting = Setting(quick, find_device(device))
    console = Console()
    done: dict[str, list[BenchRow]] = {}
    console.print(", ".join(f"{key} {value}" for key, value in machine(setting.device).items()), highlight=False)
    with stoppable(lambda: "stopped; nothing was written"), ProgressBar(len(names)) as bar:
        for name in names:
            bar.begin(name)
            done[name] = SUITES[name](setting)
            title = (SUITES[name].__doc__ or name).splitlines()[0]
            console.print()
            console.print(table(f"{name}: {title}", done[name]), highlight=False)
    if json is not None:
        write_json(json, ["ntkfl", *sys.argv[1:]], quick, setting.device, done)
        typer.echo(f"wrote {json}")
