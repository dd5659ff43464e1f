"""`ntkfl keys`, `policy` and `serve`: what operators of a federation and its sites do.

Keys and credentials of a federation, what may leave a site and has left it, and the key server or shuffler running.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ntkfl.errors import ConfigError


def _group(help: str, example: str) -> typer.Typer:
    return typer.Typer(help=f"{help}\n\nExample: {example}", no_args_is_help=True, add_completion=False)


keys = _group("Keys and credentials of a federation.", "ntkfl keys init demo --clients 5")
policy = _group("What may leave this site, and what has left it.", "ntkfl policy show /etc/ntkfl/policy.toml")
serve = _group("Run a federation's key server or shuffler.", "ntkfl serve shuffler demo/shuffler")

KeyServerFolder = Annotated[Path, typer.Argument(metavar="KEY_SERVER_DIR", help="The key server's folder.")]
Name = Annotated[str, typer.Argument(help="The client's name.")]
File = Annotated[Path, typer.Argument(help="The site's policy.toml; its ledger is the folder beside it.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The service's folder, see `ntkfl keys init`.")]
Host = Annotated[str | None, typer.Option(help="Where to listen; the host in federation.toml if not given.")]
Port = Annotated[int | None, typer.Option(help="0 takes any free one; the port in federation.toml if not given.")]

TEMPLATE = """\
# What may leave this site: docs/sites.md explains every line.
methods = ["private-sums", "private-ridge"]  # or kinds of reply: "rows", "updates", "sums"
secure_sum = "required"   # or "optional": the server may see this site's own replies
min_clients = 4           # rounds of fewer clients are refused
# shuffler = "sha256:…"   # of its public key; without it any shuffler will do
# code = ["sha256:…"]     # of ntkfl ({code}) and of the app

[privacy]                 # of one record of this site
epsilon_per_run = 3.0
epsilon_per_year = 6.0    # sum over the runs of the last 365 days
delta = 1e-6              # of each run
noise_clients = 1         # of secure sums: clients whose noise counts, this one among them
"""


@keys.command("init")
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


@keys.command("client")
def client(
    folder: KeyServerFolder,
    name: Name,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The client's folder, which is made.")],
) -> None:
    """Make the folder of one more client, with its keys and credential; hand it over and delete it."""
    from ntkfl.services.setup import add_client

    add_client(out, folder, name)
    typer.echo(f"made {out} for {name}")


@keys.command("revoke")
def revoke(folder: KeyServerFolder, name: Name) -> None:
    """End a client's service: no ρ, and its rows are refused. What it was given it keeps."""
    from ntkfl.services.key_server import KeyServer

    KeyServer(folder).revoke(name)
    typer.echo(f"revoked {name}; if it held the ρ of a run it holds it still: a new run has a new one")


@policy.command("new")
def new_policy(path: File = Path("policy.toml")) -> None:
    """Write a policy to edit."""
    from ntkfl.federation.policy import running_code

    try:
        with open(path, "x") as file:
            file.write(TEMPLATE.format(code=running_code()["ntkfl"]))
    except FileNotFoundError:
        raise ConfigError(f"no folder {path.parent}: make it first, for the owner of the SuperNode alone") from None
    except FileExistsError:
        raise ConfigError(f"{path} is there already: edit it, or choose another name") from None
    typer.echo(f"wrote {path}: edit it, then start the SuperNode with --node-config 'policy=\"{path.resolve()}\"'")


@policy.command("show")
def show_policy(path: File = Path("policy.toml")) -> None:
    """Print the policy, the runs, and what of ε is spent and left."""
    from ntkfl.federation.policy import FOLDER, Policy
    from ntkfl.privacy.ledger import FILE, Ledger, spent_in_year

    if not path.exists():
        raise ConfigError(f"no policy at {path}: `ntkfl policy new {path}` writes one to edit")
    allowed = Policy.read(path)
    for name, value in allowed.model_dump(exclude={"flower", "privacy"}).items():
        values = [value] if isinstance(value, str | int) else value
        typer.echo(f"{name:<18}{', '.join(str(one)[:20] for one in values) or 'any'}")
    for name, value in allowed.privacy or ():
        typer.echo(f"{name:<18}{value:g}")
    for file in sorted((path.parent / FOLDER).glob(f"**/{FILE}")):
        ledger = Ledger(file.parent)
        ledger.read()
        typer.echo(f"\n{file}\n{'last reply, UTC':<18}{'run':<18}{'method':<16}{'replies':>8}{'ε':>8}{'MB':>10}")
        replies = [entry for entry in ledger.entries if entry.what == "reply"]
        for run in dict.fromkeys(entry.run for entry in replies):
            last = [entry for entry in replies if entry.run == run]
            when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(last[-1].time))
            name = f"{when:<18}{run[:17]:<18}{last[-1].method.rpartition(':')[2][:15]:<16}"
            epsilon = "none" if last[-1].epsilon is None else f"{last[-1].epsilon:.3g}"
            typer.echo(f"{name}{len(last):>8}{epsilon:>8}{sum(entry.bytes for entry in last) / 1e6:>10.2f}")
        spent = spent_in_year(ledger.entries, time.time())
        year = allowed.privacy.epsilon_per_year if allowed.privacy else float("inf")
        left = (
            f" of {year:g}; {max(0.0, year - spent):.3g} are left" if allowed.privacy else "; the policy sets no limit"
        )
        typer.echo(f"ε of one record within 365 days: {spent:.3g}{left}")
        typer.echo("runs without noise have no ε, and are not counted")


@serve.command("key-server")
def key_server(folder: Folder, host: Host = None, port: Port = None) -> None:
    """The key server: gives clients the secret ρ of a run, sealed to each, and says who is revoked."""
    from ntkfl.services.web import configure_logging  # needs the extra

    configure_logging()
    from ntkfl.services.key_server import serve_key_server

    typer.echo(f"holds ρ and the names of clients in {folder}; sees no data, no rows, no model")
    serve_key_server(folder, host, port)


@serve.command("shuffler")
def shuffler(folder: Folder, host: Host = None, port: Port = None) -> None:
    """The shuffler: collects sealed rows or masked sums, and releases them without their senders."""
    from ntkfl.services.web import configure_logging  # needs the extra

    configure_logging()
    from ntkfl.services.shuffler import serve_shuffler

    typer.echo(f"holds rows it cannot read in {folder}, and until a batch is released who sent them; logs no names")
    serve_shuffler(folder, host, port)
