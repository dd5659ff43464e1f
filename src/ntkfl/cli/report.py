"""`ntkfl report`: what runs did, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Folders of runs or comparisons, or folders of them.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The page to write; if not given, report.html in the one folder given, or here for several."),
    ] = None,
) -> None:
    """Show what runs did on one page.

    The page works offline and holds everything it shows.

    Example: ntkfl report runs/a runs/b --out report.html
    """
    from ntkfl.report.page import write_report  # slow to import

    inside = runs[0] if len(runs) == 1 and runs[0].is_dir() else Path()
    typer.echo(write_report(runs, out or inside / "report.html"))
