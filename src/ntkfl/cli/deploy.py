"""`ntkfl deploy`: a whole federation to try out, and how a federation is doing."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ntkfl.cli.stopping import stoppable
from ntkfl.progress import plural

if TYPE_CHECKING:
    from ntkfl.deployment.trial import Trial
    from ntkfl.services.probe import RoleStatus

app = typer.Typer(
    help="Try a federation out, and see how one is doing.\n\nExample: ntkfl deploy try",
    no_args_is_help=True,
    add_completion=False,
)


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
    for role in trial.roles:
        if role.metrics:
            typer.echo(f"metrics of the {role.name}: {role.metrics}")
    typer.echo(f"run: {trial.out}")
    typer.echo(f"how it is doing, in another terminal: ntkfl deploy status {folder}")
    typer.echo(f"stop: Ctrl-C, or kill {os.getpid()}")


@app.command("status")
def status(
    where: Annotated[
        str, typer.Argument(metavar="DIR|URL", help="A role's, federation's or run's folder, or a service.")
    ],
    ca: Annotated[Path | None, typer.Option(help="With a URL: the authority's certificate, a role's ca.pem.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Say how a federation is doing: who is there, which round it is, how many answered, what was refused.

    Also when certificates and credentials end. It is what the role whose folder it is can tell. Ends with code 1 where
    something needs attention.

    Example: ntkfl deploy status trial
    """
    parts = _look(where, ca)
    problems = [line for part in parts for line in part.problems]
    waits_for = [name for part in parts for name in part.waits_for]
    if as_json:
        found = {"parts": [asdict(part) for part in parts], "problems": problems, "waits_for": waits_for}
        typer.echo(json.dumps(found))
    else:
        for part in parts:
            typer.echo(part.title)
            for line in part.lines:
                typer.echo(f"  {line}")
        if waits_for:
            typer.echo(f"Not started yet: {', '.join(dict.fromkeys(waits_for))}.")
        typer.echo(f"{plural(len(problems), 'problem')}:" if problems else "No problem was found.")
        for line in problems:
            typer.echo(f"  {line}")
    raise typer.Exit(int(bool(problems)))


def _look(where: str, ca: Path | None) -> list[RoleStatus]:
    """Services and clients are looked at without torch, which their machines may not have."""
    from ntkfl.services.probe import look_at_role, look_at_service  # needs the extra

    if where.startswith("https://"):
        return [look_at_service(where, ca)]
    folder = Path(where)
    if folder.name in ("", ".."):  # as "." has: titles name the folder
        folder = folder.resolve()
    if (part := look_at_role(folder)) is not None:
        return [part]
    from ntkfl.deployment.status import look

    return look(folder)
