"""`ntkfl serve`: a role of a federation, as a process."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from ntkfl.cli.verbs import LogFormat, LogLevel
from ntkfl.errors import ConfigError

app = typer.Typer(
    help="Run a federation's key server or shuffler.\n\nExample: ntkfl serve key-server demo/key-server",
    no_args_is_help=True,
    add_completion=False,
)

Host = Annotated[str | None, typer.Option(help="Where to listen; the host in federation.toml if not given.")]
Port = Annotated[int | None, typer.Option(help="0 takes any free one; the port in federation.toml if not given.")]


@app.command("key-server")
def key_server(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The key server's folder, see `ntkfl keys init`.")],
    host: Host = None,
    port: Port = None,
    credential_days: Annotated[
        float | None, typer.Option(min=0.01, max=3650, help="Days that credentials issued from now on are valid.")
    ] = None,
    log_format: LogFormat = "plain",
    log_level: LogLevel = "info",
) -> None:
    """The key server: enrols clients by one-time tokens, and gives them the run's secret ρ, sealed to each."""
    from ntkfl.services.http.server import Listener, serve
    from ntkfl.services.key_server.app import key_server_app  # needs the extra
    from ntkfl.services.key_server.store import DAY, STATE, KeyServer
    from ntkfl.services.log import configure_logging
    from ntkfl.services.role_lock import role_lock
    from ntkfl.services.trusted_peers import TrustedPeers

    peers = TrustedPeers.read(folder)
    server = KeyServer.open(folder)
    if credential_days is not None:
        server.set_lifetime(round(credential_days * DAY))
    at = address(peers.key_server.url, host, port)
    typer.echo(f"key server of federation {peers.federation}")
    typer.echo(f"holds ρ, enrolments and the hashes of tokens in {folder / STATE}, and its own keys in {folder}")
    typer.echo("sees no data, no rows, no model; whoever reads that folder can attack every row of the run")
    configure_logging("key-server", form=log_format, level=log_level)
    _warn_of_certificate(folder)
    with role_lock(folder):
        serve([Listener(key_server_app(server), *at, cert=folder / "tls.pem", key=folder / "tls-key.pem")])


@app.command("shuffler")
def shuffler(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The shuffler's folder, see `ntkfl keys init`.")],
    host: Host = None,
    port: Port = None,
    aggregator_port: Annotated[int | None, typer.Option(help="The aggregator's; else as for --port.")] = None,
    held: Annotated[int, typer.Option(min=1, help="MiB of uploads in memory at once; more must wait.")] = 512,
    log_format: LogFormat = "plain",
    log_level: LogLevel = "info",
) -> None:
    """The shuffler: collects sealed rows, releases them permuted, and relays what the aggregator announces.

    Clients that together send more than it may hold are told to retry a moment later, and do.
    """
    from ntkfl.services.log import configure_logging
    from ntkfl.services.role_lock import role_lock
    from ntkfl.services.shuffler.app import STATE, serve_shuffler
    from ntkfl.services.trusted_peers import TrustedPeers  # needs the extra

    peers = TrustedPeers.read(folder)
    at = address(peers.shuffler.url, host, port), address(peers.shuffler.aggregator_url, host, aggregator_port)
    typer.echo(f"shuffler of federation {peers.federation}, run {peers.run}")
    typer.echo(f"holds rows it cannot read, and until a batch is released who sent them, in {folder / STATE}")
    typer.echo(f"releases no batch of fewer than {peers.shuffler.min_clients} clients; logs no names")
    configure_logging("shuffler", form=log_format, level=log_level)
    _warn_of_certificate(folder)
    with role_lock(folder):
        serve_shuffler(folder, *at, max_held=held << 20)


def _warn_of_certificate(folder: Path) -> None:
    """A warning where it ends soon."""
    from ntkfl.crypto.certificates import TLS_CERT, read_certificate
    from ntkfl.services.log import warn

    ends = read_certificate(folder / TLS_CERT).not_valid_after_utc
    if ends - datetime.now(UTC) < timedelta(days=30):
        warn(f"{folder / TLS_CERT} ends on {ends:%Y-%m-%d}: ntkfl keys renew")


def address(url: str, host: str | None, port: int | None) -> tuple[str, int]:
    """Where to listen: as in the url, unless told otherwise. Says so where other machines can connect."""
    parts = urlsplit(url)
    try:
        at = host or parts.hostname or "", (parts.port or 443) if port is None else port
    except ValueError:
        raise ConfigError(f"not an address to listen on: {url}") from None
    try:
        local = at[0] == "localhost" or ipaddress.ip_address(at[0]).is_loopback
    except ValueError:
        local = False
    if not local:
        typer.echo(f"listens on {at[0]}: other machines can connect")
    return at
