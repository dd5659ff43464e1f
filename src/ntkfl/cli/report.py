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
    The first report of a run computes its kernel's spectrum, which takes seconds.

    Example: ntkfl report runs/a runs/b --out report.html
    """
    from ntkfl.cli.stopping import stoppable
    from ntkfl.progress import ProgressBar
    from ntkfl.report.page import write_report  # slow to import

    with stoppable(lambda: "stopped; no page was written, spectra computed so far are kept"), ProgressBar(0) as bar:

        def show(name: str, total: int) -> None:
            bar.plan(total)
            bar.begin(f"reading {name}")

        inside = runs[0] if len(runs) == 1 and runs[0].is_dir() else Path()
        path = write_report(runs, out or inside / "report.html", show)
    typer.echo(path)
