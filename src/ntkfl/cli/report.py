"""`ntkfl report`: what runs did, or are doing, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    typer.echo(f"{server.url}  (Ctrl-C ends it)")
    try:
        server.run()
    except KeyboardInterrupt:  # its ordinary end
        server.closing.set()
