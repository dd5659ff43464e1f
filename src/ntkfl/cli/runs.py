"""`ntkfl report` and `ntkfl forget`: what is done with runs that there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ntkfl.cli.verbs import Json
from ntkfl.errors import RunFolderError


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Folders of runs or comparisons, or folders of them.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The page to write; if not given, report.html in the one folder given, or here for several."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Serve the page to this machine's browsers while runs go on; write nothing.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --live: where to listen; 0: any free port.")] = 8440,
) -> None:
    """Show what runs did, or are doing, on one page.

    The page works offline and holds everything it shows. With --live rounds appear as they end; only this machine can
    connect: from another one, forward the port (ssh -L 8440:127.0.0.1:8440 HOST).

    Example: ntkfl report runs/a runs/b --out report.html
    """
    if not live:
        from ntkfl.report.page import write_report  # slow to import

        inside = runs[0] if len(runs) == 1 and runs[0].is_dir() else Path()
        typer.echo(write_report(runs, out or inside / "report.html"))
        return
    from ntkfl.report.live import LiveServer

    for folder in runs:  # they may still be empty
        if not folder.is_dir():
            raise RunFolderError(f"no such folder: {folder}")
    server = LiveServer(runs, port)
    try:
        typer.echo(f"{server.url}  (Ctrl-C ends it)")
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:  # its ordinary end
        server.closing.set()


def forget(
    run: Annotated[Path, typer.Argument(help="The folder of a sum-ridge run with keep_shares.")],
    client: Annotated[str, typer.Option(help="The client's name, as its data have it, or its number.")],
    as_json: Json = False,
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
