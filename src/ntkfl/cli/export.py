"""`ntkfl export`: a trained model to hand on."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from ntkfl.cli.stopping import stoppable
from ntkfl.errors import ConfigError
from ntkfl.progress import ProgressBar


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    out: Annotated[Path, typer.Option(help="A new folder for the model.")],
    to: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=KEY", help="Seal the projection to this public key (`ntkfl keys new` makes one)."),
    ] = None,
    client: Annotated[
        Path | None, typer.Option(help="Of a deployed run: the folder of an enrolled client, to ask for ρ as.")
    ] = None,
    plain_projection: Annotated[
        bool, typer.Option("--plain-projection", help="Write the projection in plain. Read the warning first.")
    ] = False,
) -> None:
    """Write a run's model, to use elsewhere: ntkfl.load_exported("model") gives it as a torch module.

    It takes inputs as the data have them and has class_names and feature_names.
    Where a method projects inputs by a secret (cp-ntk-fl), the projection is
    sealed to those you name: --to hospital=9f1c…

    Example: ntkfl export runs/a --out model
    """
    from ntkfl.federation import export as exporting

    recipients = dict(_recipient(text) for text in to or [])
    hint = f"stopped; no model was written, begin anew: {shlex.join(['ntkfl', *sys.argv[1:]])}"
    with stoppable(lambda: hint), ProgressBar(0, "bytes of the model") as bar:
        secret = None
        if client is not None:
            from ntkfl.services.key_server.client import Identity

            secret = Identity.of(client).run_secret()

        def written(count: int, total: int) -> None:
            bar.plan(total)
            bar.end(pieces=count)

        path = exporting.export(run, out, recipients, secret=secret, plain=plain_projection, on_bytes=written)
    note = exporting.Export.read(path).projection
    if plain_projection and note is not None:
        typer.secho(f"warning: {exporting.WARNING}", err=True, fg=typer.colors.YELLOW)
    sealed = "no projection" if note is None else f"projection sealed to {', '.join(note.sealed) or 'nobody'}"
    typer.echo(f"wrote {path} ({sealed})")


def _recipient(text: str) -> tuple[str, bytes]:
    from ntkfl.crypto.hpke import parse_key

    name, equals, key = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--to {text!r}: expected NAME=KEY")
    return name, parse_key(key, f"the key of {name}")
