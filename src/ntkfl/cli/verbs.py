"""The verbs, each imported when it is used: help and completion answer at once, without importing torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated

import click
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.utils import get_params_from_function

from ntkfl.errors import unknown

# What `ntkfl --help` says of each verb, in that order, and where it is: a function or a `typer.Typer` of its name.
# Other packages add theirs by an entry point of the group `ntkfl.verbs`: such a mapping, in a module without imports.
VERBS = {
    "train": ("Train one model over many clients.", "ntkfl.cli.train:train"),
    "compare": ("Compare methods on equal terms.", "ntkfl.cli.compare:compare"),
    "new": ("Write a small project to edit.", "ntkfl.cli.new:new"),
    "audit": ("Attack one round as it goes over the wire.", "ntkfl.cli.audit:audit"),
    "report": ("Show what runs did, or are doing, on one page.", "ntkfl.cli.runs:report"),
    "forget": ("Take a client out of a run, exactly.", "ntkfl.cli.runs:forget"),
    "data": ("Datasets, and how they are dealt to clients.", "ntkfl.cli.data:data"),
    "keys": ("Keys and credentials of a federation.", "ntkfl.cli.sites:keys"),
    "policy": ("What may leave this site, and what has left it.", "ntkfl.cli.sites:policy"),
    "serve": ("Run a federation's key server or shuffler.", "ntkfl.cli.sites:serve"),
}

# Names known without torch; a test holds them to those there are.
METHODS = (
    "sum-ntk-fl", "kfac-fedavg", "ntk-fl", "cp-ntk-fl", "private-sums", "sum-ridge", "private-ridge", "fedavg",
    "fednova", "fedprox", "scaffold", "fedadam", "data-share", "centralized",
)  # fmt: skip
DATASETS = ("fashion-mnist", "mnist", "femnist", "cifar10", "digits")
PARTITIONS = ("dirichlet", "writer", "iid", "shards", "client")
MODELS = ("mlp", "cnn", "resnet")

# Options that several verbs have. The help of `train` shows its options in these groups.
OfData, OfMethod, OfRun, OfPrivacy, OfOutput = (
    partial(typer.Option, rich_help_panel=group) for group in ("Data", "Method", "Run", "Privacy", "Output")
)
Set = Annotated[
    list[str] | None,
    OfMethod(
        "--set",
        metavar="NAME=VALUE",
        help="Any other setting, with a value as in TOML: lr=0.1, 'model.hidden=[64]', stop_at=0.9. May be repeated.",
    ),
]
LabelColumn = Annotated[str | None, OfData(help="Table: column of labels (default label).")]
ClientColumn = Annotated[str | None, OfData(help="Table: column with the client's name (default client).")]
SplitColumn = Annotated[str | None, OfData(help="Table: column that says train or test (default split).")]
AllowCode = Annotated[
    bool, OfRun("--allow-code", help="Run code that the folder names (package.module:factory): trust its maker.")
]
Json = Annotated[bool, OfOutput("--json", help="Print JSON on standard output, nothing else.")]


@cache
def listed() -> dict[str, tuple[str, str]]:
    """All verbs by name: (line of help, "module:name")."""
    added = {name: verb for point in entry_points(group="ntkfl.verbs") for name, verb in point.load().items()}
    return VERBS | added


@contextmanager
def stoppable(hint: Callable[[], str] = lambda: "stopped") -> Iterator[None]:
    """Where the block is interrupted by Ctrl-C, print the one line that `hint` gives (what is kept, how to go on) and
    exit with code 130. Nothing is lost: whatever this package writes is whole or not there.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(hint(), err=True)
        raise typer.Exit(130) from None


class Verbs(TyperGroup):
    """A group whose commands are imported when one is called, not when they are listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*listed()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """For lists: the verb's name and its line."""
        return TyperCommand(cmd_name, help=listed()[cmd_name][0]) if cmd_name in listed() else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """For use: the verb itself."""
        if args[0] not in listed():
            raise unknown("verb", args[0], listed())
        return args[0], load(args[0]), args[1:]


@cache
def load(name: str) -> click.Command:
    """The verb's command, with its options."""
    module, attribute = listed()[name][1].split(":")
    app = getattr(import_module(module), attribute)
    if not isinstance(app, typer.Typer):
        function, app = app, typer.Typer(add_completion=False)
        app.command(name)(function)
    command = typer.main.get_command(app)
    if isinstance(command, TyperGroup):
        command.suggest_commands = False  # click does so itself
    for one in command.commands.values() if isinstance(command, click.Group) else [command]:
        declared = get_params_from_function(one.callback) if one.callback else {}
        for parameter in one.params:
            if isinstance(parameter, TyperArgument):  # whose help click 8.5 erases
                parameter.help = declared[str(parameter.name)].default.help
    return command
