"""`ntkfl aggregate`: the server of a federation's run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntkfl.cli.stopping import stoppable, stopped_by
from ntkfl.cli.verbs import AllowCode, LogFormat, LogLevel


def aggregate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The aggregator's folder, see `ntkfl keys init`.")],
    out: Annotated[Path, typer.Option(help="The run's folder; a run that was stopped goes on from it.")],
    allow_code: AllowCode = False,
    log_format: LogFormat = "plain",
    log_level: LogLevel = "info",
) -> None:
    """Run the server that trains, behind the shuffler.

    Waits for clients, plays the rounds, and ends the run. It never holds ρ and never sees who sent a row.

    Example: ntkfl aggregate demo/aggregator --out runs/demo
    """
    from ntkfl.deployment.aggregator import Aggregator  # needs the extra
    from ntkfl.federation.server import remarks
    from ntkfl.progress import Record, RoundTable
    from ntkfl.services.log import configure_logging, log, warn
    from ntkfl.services.role_lock import role_lock

    configure_logging("aggregator", form=log_format, level=log_level)
    aggregator = Aggregator(folder, out, say=log, allow_code=allow_code)
    settings, as_json = aggregator.settings, log_format == "json"
    display = RoundTable(aggregator.server.method.name, settings.rounds, remarks, quiet=as_json)

    def show(record: Record, timing: Record) -> None:
        if as_json:
            log("round", **(record | timing))
            for line in remarks(record, timing):
                warn(f"round {record['round']}: {line}")
        display.show(record, timing)

    log(f"waits for {settings.clients} clients at {aggregator.federation.shuffler.aggregator_url}")
    allowed = " --allow-code" if allow_code else ""

    def stopped() -> str:
        log(f"stopped by {stopped_by()}; go on with: ntkfl aggregate {folder} --out {out}{allowed}")
        return ""

    with role_lock(folder), stoppable(stopped, terminable=True), display:
        run = aggregator.run(on_round=show)
    display.summary(run.history, run.timings, out)
