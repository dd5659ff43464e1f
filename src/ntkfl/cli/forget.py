"""`ntkfl forget`: exact unlearning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def forget(
    run: Annotated[Path, typer.Argument(help="The folder of a sum-ridge run with keep_shares.")],
    client: Annotated[str, typer.Option(help="The client's name, as its data have it, or its number.")],
    as_json: Annotated[bool, typer.Option("--json", help="the record as JSON on stdout, nothing else")] = False,
) -> None:
    """Take a client out of a run, exactly.

    Example: ntkfl forget runs/a --client north
    """
    from ntkfl.federation import shares
    from ntkfl.progress import percent

    record = shares.forget(run, client)
    if as_json:
        typer.echo(json.dumps(record))
        return
    typer.echo(
        f"forgot client {client} and its {record['samples']:,} samples: the model is that of the other "
        f"{record['clients_left']} clients (λ {record['penalty']:g}); weights changed by "
        f"{percent(record['relative_change'], 2)}; recorded in {run / shares.RECORDS}"
    )
    typer.echo("the history's scores of the old model are gone: measure the new one with Run.load(…).evaluate(x, y)")
