"""`ntkfl flower bench`: what Flower costs a round."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ntkfl.cli.stopping import stoppable
from ntkfl.progress import ProgressBar
from ntkfl_experiments.bench.machine import look
from ntkfl_experiments.bench.rows import Setting
from ntkfl_experiments.bench.table import document, table, write_json


def bench(
    clients: Annotated[str, typer.Option(help="Numbers of clients, separated by commas; '': none.")] = "4,16",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; the first is not counted.")] = 4,
    large: Annotated[int, typer.Option(help="Also one message of this many MB; 0: none.")] = 320,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write machine, versions and rows there.")] = None,
) -> None:
    """What Flower costs a round: beside one process, in its simulation and deployed on this machine. Minutes."""
    from ntkfl_experiments.bench.flower import VERSIONS, WAYS, overhead  # needs the extra
    from ntkfl_experiments.bench.flower import large as large_message

    machine = look(Setting(quick=True))
    counts = [int(count) for count in clients.split(",") if count]
    pieces = WAYS * len(counts) + bool(large)
    with stoppable(lambda: "stopped; nothing was written"), ProgressBar(pieces) as bar:
        rows = [row for count in counts for row in overhead(count, rounds, bar.begin)]
        if large:
            rows.append(large_message(large, bar.begin))
    Console().print(table("What Flower costs a round", rows, machine), highlight=False)
    if json_file is not None:
        content = document(["ntkfl", *sys.argv[1:]], False, machine, {"flower": rows})
        content["versions"] |= VERSIONS
        write_json(json_file, content)
        typer.echo(f"wrote {json_file}")
