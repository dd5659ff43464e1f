"""`ntkfl serve load`: how much a key server and a shuffler bear on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from ntkfl.cli.stopping import stoppable
from ntkfl.progress import span


def load(
    out: Annotated[Path, typer.Option(help="Folder for load.json, table.md and load.png.")] = Path("results/load"),
    clients: Annotated[int, typer.Option(min=2, help="Clients that enrol and listen.")] = 1000,
    at_once: Annotated[int, typer.Option(min=2, help="Clients that upload at the same time.")] = 200,
    rows: Annotated[int, typer.Option(min=1, help="Rows of an upload.")] = 60,
    row_bytes: Annotated[int, typer.Option(min=200, help="Bytes of a sealed row.")] = 12_151,
    weights: Annotated[int, typer.Option(min=1, help="Weights in each announcement.")] = 79_510,
    seconds: Annotated[float, typer.Option(min=1, help="How long.")] = 180,
    hostile: Annotated[int, typer.Option(min=0, help="Connections that mean no good, all the while.")] = 28,
) -> None:
    """Load a key server and a shuffler on this machine from a second process: speed, delays, memory.

    Makes a federation of its own in a temporary folder. Every row is opened and compared at the aggregator's end.
    The time left counts the two rounds with little memory that follow.

    Example: ntkfl serve load --seconds 180 --out results/load
    """
    from ntkfl_experiments.bench.load.run import Load, run
    from ntkfl_experiments.bench.load.write import figures, write

    def say(line: str, left: float) -> None:
        typer.echo(f"{line}  ({span(left)} left)", err=True)

    wanted = Load(clients, at_once, rows, row_bytes, weights, seconds, hostile)
    with stoppable(lambda: "stopped; nothing was written"), TemporaryDirectory() as folder:
        document = run(wanted, Path(folder), say)
    for what, found in figures(document).items():
        typer.echo(f"{what}: {found}")
    for path in write(document, out, ["ntkfl", *sys.argv[1:]]):
        typer.echo(f"wrote {path}")
