"""`ntkfl serve`: the key server or the shuffler, as a process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Run a federation's key server or shuffler.\n\nExample: ntkfl serve shuffler demo/shuffler",
    no_args_is_help=True,
    add_completion=False,
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The service's folder, see `ntkfl keys init`.")]
Host = Annotated[str | None, typer.Option(help="Where to listen; the host in federation.toml if not given.")]
Port = Annotated[int | None, typer.Option(help="0 takes any free one; the port in federation.toml if not given.")]


@app.command("key-server")
def key_server(folder: Folder, host: Host = None, port: Port = None) -> None:
    """The key server: gives clients the secret ρ of a run, sealed to each, and says who is revoked."""
    from ntkfl.services.web import configure_logging  # needs the extra

    configure_logging()
    from ntkfl.services.key_server import serve_key_server

    typer.echo(f"holds ρ and the names of clients in {folder}; sees no data, no rows, no model")
    serve_key_server(folder, host, port)


@app.command("shuffler")
def shuffler(folder: Folder, host: Host = None, port: Port = None) -> None:
    """The shuffler: collects sealed rows or masked sums, and releases them without their senders."""
    from ntkfl.services.web import configure_logging  # needs the extra

    configure_logging()
    from ntkfl.services.shuffler import serve_shuffler

    typer.echo(f"holds rows it cannot read in {folder}, and until a batch is released who sent them; logs no names")
    serve_shuffler(folder, host, port)
