"""`ntkfl keys`: folders to try a federation out with, and what the operator of a key server does."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ntkfl.cli.stopping import stoppable
from ntkfl.errors import ConfigError, TrustError
from ntkfl.progress import ProgressBar, plural

app = typer.Typer(
    help="Keys, tokens and certificates of a federation.\n\nExample: ntkfl keys init demo --clients 4",
    no_args_is_help=True,
    add_completion=False,
)

KeyServerFolder = Annotated[Path, typer.Argument(metavar="KEY_SERVER_DIR", help="The key server's folder.")]


@app.command("init")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    config: Annotated[
        Path | None, typer.Option(help="The run: inputs, outputs, a model, …; if not given, a demo on digits.")
    ] = None,
    clients: Annotated[int, typer.Option(help="Clients to make a folder and a token for.")] = 4,
    evaluators: Annotated[int, typer.Option(help="Evaluators to make a folder and a token for.")] = 1,
    federation: Annotated[str, typer.Option(help="The federation's name.")] = "demo",
    run: Annotated[str, typer.Option(help="The run's name.")] = "run-0",
    host: Annotated[str, typer.Option(help="Name or address under which the services are reached.")] = "127.0.0.1",
    key_server_host: Annotated[str | None, typer.Option(help="The key server's, where it is not --host.")] = None,
    shuffler_host: Annotated[str | None, typer.Option(help="The shuffler's, where it is not --host.")] = None,
    key_server_port: Annotated[int, typer.Option(help="The key server's port.")] = 8441,
    shuffler_port: Annotated[int, typer.Option(help="The shuffler's port for clients.")] = 8442,
    aggregator_port: Annotated[int, typer.Option(help="The shuffler's port for the aggregator.")] = 8443,
    min_clients: Annotated[int, typer.Option(help="Distinct clients below which no batch is released.")] = 2,
    credential_days: Annotated[
        float, typer.Option(min=0.01, max=3650, help="Days until a client's credential ends; it is renewed.")
    ] = 30,
) -> None:
    """Make a whole federation to try out: one folder per role, each with just what that role may hold."""
    from ntkfl.deployment import demo_setup  # needs the extra

    setup = demo_setup.DemoSetup(
        federation=federation,
        run=run,
        clients=clients,
        evaluators=evaluators,
        min_clients=min_clients,
        host=host,
        key_server_host=key_server_host,
        shuffler_host=shuffler_host,
        key_server_port=key_server_port,
        shuffler_port=shuffler_port,
        aggregator_port=aggregator_port,
        credential_days=credential_days,
    )
    with (
        stoppable(lambda: f"stopped; begin anew: rm -r {folder}"),
        ProgressBar(clients + evaluators, "folders of clients") as bar,
    ):
        made = demo_setup.init(folder, config or demo_setup.demo_run(setup), setup, on_client=bar.end)
    members = f"{plural(clients, 'client')}, {plural(evaluators, 'evaluator')}"
    typer.echo(f"federation {made.federation}, run {made.run}: {members}")
    typer.echo(
        f"  {folder / 'key-server'}    gives ρ to enrolled clients: ntkfl serve key-server {folder / 'key-server'}"
    )
    typer.echo(f"  {folder / 'shuffler'}      mixes sealed rows: ntkfl serve shuffler {folder / 'shuffler'}")
    typer.echo(f"  {folder / 'aggregator'}    trains, without ρ")
    typer.echo(f"  {folder / 'clients'}       one folder per client: whom it trusts, and a one-time token")
    typer.echo(f"  {folder / 'authority'}     renews certificates (ntkfl keys renew): keep it apart from all roles")
    typer.echo("All keys were made here, on one machine: a demo. In production no machine sees two roles' keys.")


@app.command("token")
def token(
    folder: KeyServerFolder,
    client: Annotated[str, typer.Option(help="The client's name.")],
    role: Annotated[str, typer.Option(help="client or evaluator.")] = "client",
    out: Annotated[Path | None, typer.Option(help="Make the client's folder there instead of printing.")] = None,
) -> None:
    """Make a one-time token with which one client enrols; hand it over out of band."""
    from ntkfl.deployment.demo_setup import client_folder
    from ntkfl.services.key_server.store import KeyServer

    server = KeyServer.open(folder)
    if out is None:
        typer.echo(server.make_token(client, role))
        return
    if out.exists():  # before a token is made that no client would get
        raise ConfigError(f"{out} is there already; give a new folder")
    client_folder(out, folder, server.make_token(client, role))
    typer.echo(f"made {out} for {role} {client}")


@app.command("revoke")
def revoke(folder: KeyServerFolder, name: Annotated[str, typer.Argument(help="The client.")]) -> None:
    """End a client's service: no ρ, no enrolment, and its rows are refused. What it was given it keeps."""
    from ntkfl.services.key_server.store import KeyServer

    KeyServer.open(folder).revoke(name)
    typer.echo(f"revoked {name}; if it held ρ it holds it still: a new run has a new one")


@app.command("run")
def add_run(folder: KeyServerFolder, name: Annotated[str, typer.Argument(help="The new run.")]) -> None:
    """Register a further run, with a ρ of its own."""
    from ntkfl.services.key_server.store import KeyServer

    KeyServer.open(folder).add_run(name)
    typer.echo(f"registered run {name}")


@app.command("list")
def list_clients(folder: KeyServerFolder) -> None:
    """Every client: its role, whether it enrolled, whether it is revoked, when its credential ends."""
    from rich.console import Console
    from rich.table import Table

    from ntkfl.crypto.credentials import as_date
    from ntkfl.services.key_server.store import KeyServer

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("client", "role", "enrolled", "revoked", "credential ends"):
        table.add_column(column, no_wrap=True)
    server = KeyServer.open(folder)
    for client in server.clients():
        said = ("yes" if is_so else "no" for is_so in (client.enrolled, client.revoked))
        table.add_row(client.name, client.role, *said, "" if client.ends is None else as_date(client.ends))
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
    typer.echo(f"runs: {', '.join(server.runs())}")


@app.command("readmit")
def readmit(folder: KeyServerFolder, name: Annotated[str, typer.Argument(help="The client.")]) -> None:
    """Let a client go on that was away for so long that its credential ended. A revoked one stays out."""
    from ntkfl.services.key_server.store import KeyServer

    KeyServer.open(folder).readmit(name)
    typer.echo(f"{name} can renew its credential: it does so when it is started")


@app.command("renew")
def renew(
    authority: Annotated[Path, typer.Argument(metavar="AUTHORITY_DIR", help="The authority's folder.")],
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of roles, with tls.pem in each.")],
) -> None:
    """Renew TLS certificates for a year, with new keys. Roles that trust the authority notice nothing.

    Example: ntkfl keys renew demo/authority demo/key-server demo/shuffler demo/aggregator
    """
    from ntkfl.crypto import certificates  # needs the extra

    for done in certificates.renew(authority, folders):
        typer.echo(f"{done.folder}: valid until {done.ends:%Y-%m-%d} (was {done.before:%Y-%m-%d}); start it again")


@app.command("show")
def show(folder: Annotated[Path, typer.Argument(help="A role's folder, or one key file.")]) -> None:
    """The public keys, in hexadecimal, of the private keys in a folder, and when its certificates end."""
    from ntkfl.crypto.certificates import read_certificate
    from ntkfl.crypto.hpke import SealingKey, SigningKey

    found = 0
    for path in sorted(folder.glob("*.pem")) if folder.is_dir() else [folder]:
        for kind in (SealingKey, SigningKey):
            try:
                public = kind.load(path).public.hex()
            except TrustError:  # a certificate, or the other kind
                continue
            typer.echo(f"{path.name} {'X25519' if kind is SealingKey else 'Ed25519'} {public}")
            found += 1
        with suppress(ConfigError):  # a key
            typer.echo(f"{path.name} {_end(read_certificate(path).not_valid_after_utc.timestamp())}")
            found += 1
    if (end := _credential_end(folder / "credential")) is not None:
        typer.echo(f"credential {_end(end)}")
        found += 1
    if not found:
        raise ConfigError(f"no key, certificate or credential in {folder}")


def _end(seconds: float) -> str:
    """When something ends or ended, given in seconds since 1970."""
    from ntkfl.crypto.credentials import as_date

    return f"{'ends' if seconds > time.time() else 'ended'} {as_date(seconds)}"


def _credential_end(path: Path) -> float | None:
    """When a client's credential ends; None where there is none of its key server's."""
    from ntkfl.crypto.credentials import Credential
    from ntkfl.services.trusted_peers import TrustedPeers

    if not path.is_file():
        return None
    peers = TrustedPeers.read(path.parent)
    key_server = bytes.fromhex(peers.key_server.signing_key)
    return Credential.check(path.read_text(), key_server, peers.federation, allow_expired=True).ends


@app.command("new")
def new(file: Annotated[Path, typer.Argument(help="Where to write the private key; never over a file.")]) -> None:
    """Make an X25519 key for a recipient of exported models; prints the public key to give away."""
    from ntkfl.crypto.hpke import SealingKey

    key = SealingKey.generate()
    key.save(file)
    typer.echo(key.public.hex())
