"""`ntkfl policy`: what may leave a site, and what has left it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="What may leave this site, and what has left it.\n\nExample: ntkfl policy show /etc/ntkfl/policy.toml",
    no_args_is_help=True,
    add_completion=False,
)
File = Annotated[Path, typer.Argument(help="The site's policy.toml; its ledger is the folder beside it.")]

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


@app.command()
def new(path: File = Path("policy.toml")) -> None:
    """Write a policy to edit."""
    from ntkfl.errors import ConfigError
    from ntkfl.federation.policy import running_code

    try:
        with open(path, "x") as file:
            file.write(TEMPLATE.format(code=running_code()["ntkfl"]))
    except FileNotFoundError:
        raise ConfigError(f"no folder {path.parent}: make it first, for the owner of the SuperNode alone") from None
    except FileExistsError:
        raise ConfigError(f"{path} is there already: edit it, or choose another name") from None
    typer.echo(f"wrote {path}: edit it, then start the SuperNode with --node-config 'policy=\"{path.resolve()}\"'")


@app.command()
def show(path: File = Path("policy.toml")) -> None:
    """Print the policy, the runs, and what of ε is spent and left."""
    from ntkfl.federation.policy import FOLDER, Policy
    from ntkfl.privacy.ledger import FILE, Ledger, spent_in_year

    policy = Policy.read(path)
    for name, value in policy.model_dump(exclude={"flower", "privacy"}).items():
        values = [value] if isinstance(value, str | int) else value
        typer.echo(f"{name:<18}{', '.join(str(one)[:20] for one in values) or 'any'}")
    for name, value in policy.privacy or ():
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
        year = policy.privacy.epsilon_per_year if policy.privacy else float("inf")
        typer.echo(f"ε of one record within 365 days: {spent:.3g} of {year:g}; {max(0.0, year - spent):.3g} are left")
