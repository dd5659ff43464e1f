"""`ntkfl keys`: the folders of a federation, and what the operator of its key server does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Keys and credentials of a federation.\n\nExample: ntkfl keys init demo --clients 5",
    no_args_is_help=True,
    add_completion=False,
)

KeyServerFolder = Annotated[Path, typer.Argument(metavar="KEY_SERVER_DIR", help="The key server's folder.")]
Name = Annotated[str, typer.Argument(help="The client's name.")]


@app.command("init")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    clients: Annotated[int, typer.Option(min=2, help="Clients to make a folder for.")],
    per_round: Annotated[int | None, typer.Option(help="Clients that each round asks; all if not given.")] = None,
    least: Annotated[
        int | None, typer.Option(help="Clients that must answer before anything is released; all of the round's.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of samples that each client sends, padding included.")] = 200,
    federation: Annotated[str, typer.Option(help="The federation's name.")] = "demo",
    key_server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where it is reached.")] = "127.0.0.1:8441",
    shuffler: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where it is reached.")] = "127.0.0.1:8442",
) -> None:
    """Make one folder per role, each with just what that role may hold."""
    from ntkfl.services import setup  # needs the extra
    from ntkfl.services.peers import RoundTerms

    asked = per_round or clients
    terms = RoundTerms(clients=asked, least=least or asked, rows=rows)
    setup.init(folder, [f"client-{i}" for i in range(clients)], terms, federation, key_server, shuffler)
    typer.echo(f"{folder / 'key-server'}    to its operator: ntkfl serve key-server DIR")
    typer.echo(f"{folder / 'shuffler'}      to its operator, who is another: ntkfl serve shuffler DIR")
    typer.echo(f"{folder / 'aggregator'}    to the server app: ntkfl.flower.Shuffler(DIR)")
    typer.echo(f"{folder / 'clients'}       one to each client, with its keys and credential")
    typer.echo("Hand them over and delete them here: whoever holds all folders can attack every row.")


@app.command("client")
def client(
    folder: KeyServerFolder,
    name: Name,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The client's folder, which is made.")],
) -> None:
    """Make the folder of one more client, with its keys and credential; hand it over and delete it."""
    from ntkfl.services.setup import add_client

    add_client(out, folder, name)
    typer.echo(f"made {out} for {name}")


@app.command("revoke")
def revoke(folder: KeyServerFolder, name: Name) -> None:
    """End a client's service: no ρ, and its rows are refused. What it was given it keeps."""
    from ntkfl.services.key_server import KeyServer

    KeyServer(folder).revoke(name)
    typer.echo(f"revoked {name}; if it held the ρ of a run it holds it still: a new run has a new one")
