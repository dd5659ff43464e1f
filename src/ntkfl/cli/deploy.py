"""`ntkfl deploy`: a whole federation to try out."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ntkfl.cli.stopping import stoppable
from ntkfl.progress import plural

if TYPE_CHECKING:
    from ntkfl.deployment.trial import Trial

app = typer.Typer(
    help="Try a federation out.\n\nExample: ntkfl deploy try",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def deploy() -> None:
    """Typer would take a lone command for the verb itself."""


@app.command("try")
def try_out(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A new folder, or one of a trial to go on with.")
    ] = Path("trial"),
    clients: Annotated[int | None, typer.Option(min=2, max=32, help="Clients, a process each; 4 if not given.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of training; 5 if not given.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the services running after the last round.")] = False,
) -> None:
    """Start a whole federation here, train CP-NTK-FL on the built-in digits, and stop it again.

    Key server, shuffler, aggregator, clients and an evaluator are processes of their own, with keys, TLS and logs.
    Ctrl-C stops all of them; the same command then goes on.

    Example: ntkfl deploy try
    """
    from ntkfl.deployment.trial import Trial  # needs the extra

    hint = f"stopped, with all that it started; go on with: ntkfl deploy try {folder}"
    with (
        stoppable(lambda: hint, terminable=True),
        Trial(folder, clients, rounds, say=lambda line: typer.echo(line, err=True)) as trial,
    ):
        trial.start()
        _tell(trial)
        code = trial.train(lambda said: typer.echo(said, nl=False))
        if code == 0 and keep:
            typer.echo("the run has ended; the services go on until Ctrl-C")
            while True:
                trial.check()
                time.sleep(0.2)
    if code == 0:
        typer.echo(f"all processes have ended; look at it with: ntkfl report {trial.out}")
    else:
        typer.echo(
            f"the aggregator ended with code {code}; all others were stopped; go on with: ntkfl deploy try {folder}"
        )
    raise typer.Exit(code if code >= 0 else 1)


def _tell(trial: Trial) -> None:
    """What was started, and how to look at it and stop it."""
    settings, folder = trial.settings, trial.folder
    members = f"{plural(settings.clients, 'client')}, {plural(settings.evaluators, 'evaluator')}"
    typer.echo(f"{members}, {plural(settings.rounds, 'round')} of {settings.method['name']} on digits, in {folder}")
    for role in trial.roles:
        typer.echo(f"  {role.name:12} pid {role.process.pid:<8} {role.log}  {role.url}".rstrip())
    typer.echo(f"run: {trial.out}")
    typer.echo(f"stop: Ctrl-C, or kill {os.getpid()}")
