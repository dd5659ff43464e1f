"""`ntkfl policy`: what may leave a site, and what has left it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ntkfl.privacy.ledger import Ledger

app = typer.Typer(
    help="What may leave this site, and what has left it.\n\nExample: ntkfl policy show /etc/ntkfl/policy.toml",
    no_args_is_help=True,
    add_completion=False,
)
File = Annotated[Path, typer.Argument(help="The site's policy.toml; its ledger is the folder beside it.")]

TEMPLATE = """\
# What may leave this site. Give it to the SuperNode: --node-config 'policy="{path}"'
# docs/sites.md explains every line; `ntkfl policy show {path}` prints the ledger.

# Methods by name, or kinds of reply: "rows", "updates", "sums". An ordinary Flower
# app under ntkfl.flower.guard is called "flower".
methods = ["private-sums", "private-ridge"]
secure_sum = "required"      # or "optional": replies may also go to the server as they are
# shuffler = "sha256:…"      # digest of the shuffler's public key; without it any shuffler will do
min_clients = 4              # rounds of fewer clients are refused
# code = ["sha256:…"]        # digests of ntkfl and the app; without it any code will do
#                              ntkfl here is {code}

[privacy]                    # of one record of this site, with or without it
epsilon_per_run = 3.0
epsilon_per_year = 6.0       # sum over the runs of the last 365 days
delta = 1e-6                 # of each run
noise_clients = 1            # secure sums: clients whose noise counts, this one among them

# [flower]                   # an ordinary Flower app: what its replies may hold beside arrays
# metrics = ["train_loss", "num-examples"]
# max_mb = 100
"""


@app.command()
def new(path: File = Path("policy.toml")) -> None:
    """Write a policy to edit."""
    from ntkfl.errors import ConfigError
    from ntkfl.privacy.policy import running_code

    text = TEMPLATE.format(path=path.resolve(), code=running_code()["ntkfl"])
    try:
        with open(path, "x") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} is there already: edit it, or choose another name") from None
    typer.echo(f"wrote {path}: edit it, then start the SuperNode with --node-config 'policy=\"{path.resolve()}\"'")


@app.command()
def show(path: File = Path("policy.toml")) -> None:
    """Print the policy, the runs, and what of ε is spent and left."""
    from ntkfl.privacy.ledger import FILE, Ledger
    from ntkfl.privacy.policy import FOLDER, Policy

    policy = Policy.read(path)
    for name, value in policy.model_dump(exclude={"privacy", "flower"}).items():
        values = [value] if isinstance(value, str | int) else value
        typer.echo(f"{name:<12}{', '.join(str(one)[:20] for one in values) or 'any'}")
    limits = policy.privacy
    typer.echo(
        f"{'privacy':<12}{f'ε ≤ {limits.epsilon_per_run:g} a run, {limits.epsilon_per_year:g} a year; δ = {limits.delta:g} a run' if limits else 'no limit'}"
    )
    for file in sorted((path.parent / FOLDER).glob(f"**/{FILE}")):
        _show_ledger(Ledger(file.parent), limits.epsilon_per_year if limits else None)


def _show_ledger(ledger: Ledger, most: float | None) -> None:
    """A line per run, in the order of their first replies, and the year's sum."""
    from ntkfl.privacy.ledger import spent_in_year

    ledger.read()
    typer.echo(f"\n{ledger.folder}\n{'last reply, UTC':<18}{'run':<18}{'method':<16}{'replies':>8}{'ε':>8}{'MB':>10}")
    for run in dict.fromkeys(entry.run for entry in ledger.entries):
        replies = [entry for entry in ledger.entries if entry.run == run and entry.what == "reply"]
        if replies:
            last, size = replies[-1], sum(entry.bytes for entry in replies) / 1e6
            when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(last.time))
            epsilon = "none" if last.epsilon is None else f"{last.epsilon:.3g}"
            method = last.method.rpartition(":")[2]
            typer.echo(f"{when:<18}{run[:17]:<18}{method[:15]:<16}{len(replies):>8}{epsilon:>8}{size:>10.2f}")
    spent = spent_in_year(ledger.entries, time.time())
    left = "" if most is None else f" of {most:g}; {max(0.0, most - spent):.3g} are left"
    typer.echo(f"ε of one record within 365 days: {spent:.3g}{left}")
