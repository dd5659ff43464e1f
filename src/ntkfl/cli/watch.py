"""`ntkfl watch`: runs as they go on, in a browser."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

import typer

from ntkfl.errors import ConfigError, RunFolderError


def watch(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS_DIR…", help="Folders of runs and comparisons; they may still be empty."),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8440,
    plain: Annotated[
        bool, typer.Option("--plain-http", help="Let other machines connect, although nothing is encrypted.")
    ] = False,
) -> None:
    """Watch runs while they go on.

    Serves the report's page: rounds appear as they end, stopped runs say so.
    Writes nothing; only this machine can connect unless --host and --plain-http say otherwise.

    Example: ntkfl watch runs
    """
    from ntkfl.report.live import LiveServer  # slow to import

    for folder in folders:
        if not folder.is_dir():
            raise RunFolderError(f"no such folder: {folder}")
    if not is_local(host) and not plain:
        raise ConfigError(
            f"{host} is open to other machines and this page is not encrypted: say --plain-http too, or stay on "
            f"127.0.0.1 and forward the port (ssh -L {port}:127.0.0.1:{port} HERE)"
        )
    server = LiveServer(folders, host, port)
    try:
        typer.echo(f"{server.url}  (Ctrl-C ends it)")
        if not is_local(host):
            typer.echo("other machines can connect, and see settings, curves and data counts of these runs", err=True)
        server.run()
    except KeyboardInterrupt:
        server.closing.set()


def is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
