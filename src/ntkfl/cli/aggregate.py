"""`ntkfl aggregate`: the server of a federation's run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntkfl.cli.stopping import stoppable
from ntkfl.cli.verbs import AllowCode


def aggregate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The aggregator's folder, see `ntkfl keys init`.")],
    out: Annotated[Path, typer.Option(help="The run's folder; a run that was stopped goes on from it.")],
    allow_code: AllowCode = False,
) -> None:
    """Run the server that trains, behind the shuffler.

    Waits for clients, plays the rounds, and ends the run. It never holds ρ and never sees who sent a row.

    Example: ntkfl aggregate demo/aggregator --out runs/demo
    """
    from ntkfl.deployment.aggregator import Aggregator  # needs the extra
    from ntkfl.federation.server import remarks
    from ntkfl.progress import RoundTable

    aggregator = Aggregator(folder, out, say=lambda line: typer.echo(line, err=True), allow_code=allow_code)
    settings = aggregator.settings
    display = RoundTable(aggregator.server.method.name, settings.rounds, remarks)
    typer.echo(f"waits for {settings.clients} clients at {aggregator.federation.shuffler.aggregator_url}")
    allowed = " --allow-code" if allow_code else ""
    with stoppable(lambda: f"stopped; go on with: ntkfl aggregate {folder} --out {out}{allowed}"), display:
        run = aggregator.run(on_round=display.show)
    display.summary(run.history, run.timings, out)
