"""`ntkfl forget`: exact unlearning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ntkfl.cli.verbs import AllowCode


def forget(
    run: Annotated[Path, typer.Argument(help="The folder of a sum-ridge run with keep_shares.")],
    client: Annotated[str, typer.Option(help="The client's name, as its data have it, or its number.")],
    allow_code: AllowCode = False,
    no_score: Annotated[
        bool, typer.Option("--no-score", help="do not measure the model that is left: its history has no score")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the record as JSON on stdout, nothing else")] = False,
) -> None:
    """Take a client out of a run, exactly.

    Example: ntkfl forget runs/a --client north
    """
    from ntkfl.federation import shares
    from ntkfl.federation.run_folder import RunFolder
    from ntkfl.progress import percent

    record = shares.forget(run, client, allow_code=allow_code, score=not no_score)
    if as_json:
        typer.echo(json.dumps(record))
        return
    typer.echo(
        f"forgot client {client} and its {record['samples']:,} samples: the model is that of the other "
        f"{record['clients_left']} clients (λ {record['penalty']:g}); weights changed by "
        f"{percent(record['relative_change'], 2)}; recorded in {run / shares.RECORDS}"
    )
    before = RunFolder(run).records()[record["round"] - 1].get(shares.BEFORE, {}).get("test_accuracy")
    was = "" if before is None else f", {percent(before)} before anything was forgotten"
    if no_score:
        typer.echo(f"the model that is left was not measured, and the history has no score{was}")
    elif record["test_accuracy"] is not None:
        typer.echo(f"test accuracy {percent(record['test_accuracy'])} now{was}; the history and reports have it")
    else:
        typer.echo(f"test loss {record['test_loss']:.4g} now; the history and reports have it")
    if (run / "wire").exists():
        typer.secho(f"warning: {run / 'wire'} holds recorded messages, perhaps of this client: delete it", err=True)
