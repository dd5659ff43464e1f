"""`ntkfl doctor`: is everything here that is needed, and what to do where it is not."""

from __future__ import annotations

from typing import Annotated

import typer

from ntkfl.cli.verbs import coloured


def doctor(
    gpu: Annotated[bool, typer.Option("--gpu", help="Fail where there is no GPU to use.")] = False,
) -> None:
    """Check this machine: versions, extras, GPU and data.

    Ends with code 1 where something that is needed is missing. Each line that is not well says what to do.

    Example: ntkfl doctor
    """
    from ntkfl.doctor import examine  # slow to import

    signs = {"good": "ok  ", "note": "note", "bad": "BAD "}
    colours = {"good": typer.colors.GREEN, "note": typer.colors.YELLOW, "bad": typer.colors.RED}
    worst = 0
    for finding in examine(needs_gpu=gpu):
        sign = coloured(signs[finding.kind], colours[finding.kind])
        typer.echo(f"{sign} {finding.what}: {finding.found}")
        if finding.advice:
            typer.echo(f"       {finding.advice}")
        worst = max(worst, int(finding.kind == "bad"))
    typer.echo("Something that is needed is missing, see above." if worst else "Ready.")
    raise typer.Exit(worst)
