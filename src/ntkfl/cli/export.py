"""`ntkfl export`: a trained model to hand on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntkfl.errors import ConfigError


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    out: Annotated[Path, typer.Option(help="A new folder for the model.")],
    to: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=KEY", help="Seal the projection to this public key (`ntkfl keys new` makes one)."),
    ] = None,
    client: Annotated[
        Path | None, typer.Option(help="Of a run on Flower: the folder of an enrolled client, to ask for ρ as.")
    ] = None,
) -> None:
    """Write a run's model, to use elsewhere: ntkfl.load_exported("model") gives it as a torch module.

    It takes inputs as the data have them and has class_names and feature_names.
    Where a method projects inputs by a secret (cp-ntk-fl), the projection is
    sealed to those you name: --to hospital=9f1c…

    Example: ntkfl export runs/a --out model
    """
    from ntkfl.federation import export as exporting

    recipients = dict(_recipient(text) for text in to or [])
    secret = None
    if client is not None:
        from ntkfl.federation.run_folder import RunFolder
        from ntkfl.services.key_server.client import Identity

        if not (name := RunFolder(run).config().get("run")):
            raise ConfigError(f"{run} does not say what its run is called: it was not trained behind a key server")
        secret = Identity(client).run_secret(name)
    path = exporting.export(run, out, recipients, secret=secret)
    note = exporting.Export.read(path).projection
    sealed = "no projection" if note is None else f"projection sealed to {', '.join(note.sealed) or 'nobody'}"
    typer.echo(f"wrote {path} ({sealed})")


def _recipient(text: str) -> tuple[str, bytes]:
    from ntkfl.crypto.hpke import parse_key

    name, equals, key = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--to {text!r}: expected NAME=KEY")
    return name, parse_key(key, f"the key of {name}")
