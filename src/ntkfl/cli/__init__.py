"""The command line: parse, call, print."""

from __future__ import annotations

import os
import sys

import typer

from ntkfl.cli import data as data_commands
from ntkfl.cli import flower as flower_commands
from ntkfl.cli import keys as keys_commands
from ntkfl.cli import serve as serve_commands
from ntkfl.cli.aggregate import aggregate
from ntkfl.cli.bench import bench
from ntkfl.cli.compare import compare
from ntkfl.cli.export import export
from ntkfl.cli.join import join
from ntkfl.cli.train import train
from ntkfl.errors import NTKFLError
from ntkfl.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Federated learning by neural tangent kernels.",
)
app.command()(train)
app.command()(compare)
app.command()(bench)
app.command()(export)
app.command()(join)
app.command()(aggregate)
app.add_typer(data_commands.app, name="data")
app.add_typer(flower_commands.app, name="flower")
app.add_typer(keys_commands.app, name="keys")
app.add_typer(serve_commands.app, name="serve")


@app.callback(invoke_without_command=True)
def top(version: bool = typer.Option(False, "--version", help="Print the version and leave.", is_eager=True)) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line: an error a user can cause is one line and exit code 2, never a traceback."""
    try:
        app(prog_name="ntkfl")
    except NTKFLError as error:
        typer.secho(f"ntkfl: {error}", err=True, fg=typer.colors.RED)
        sys.exit(2)
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
