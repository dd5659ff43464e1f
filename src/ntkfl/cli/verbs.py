"""The verbs, each imported when it is used: help and completion answer at once, without importing torch."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated

import click
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.utils import get_params_from_function

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
    "fednova", "fedprox", "scaffold", "fedadam", "fedcom", "qsgd", "data-share", "centralized",
)  # fmt: skip
DATASETS = ("fashion-mnist", "mnist", "femnist", "cifar10", "digits")
PARTITIONS = ("dirichlet", "writer", "iid", "shards", "client")
MODELS = ("mlp", "cnn", "resnet", "gru", "transformer")

# Options that several verbs have.
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="run code that the folder names (package.module:factory): trust its maker")
]
LabelColumn = Annotated[str | None, typer.Option(help="of a table: the column of labels; label if not given")]
ClientColumn = Annotated[
    str | None, typer.Option(help="of a table: the column with the client's name; client if not given")
]
SplitColumn = Annotated[str | None, typer.Option(help="of a table: the column of train and test; split if not given")]
Json = Annotated[bool, typer.Option("--json", help="the result as JSON on stdout, nothing else")]


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
            near = difflib.get_close_matches(args[0], listed(), n=1)
            ctx.fail(f"no verb {args[0]!r}{f': did you mean {near[0]!r}?' if near else ''}")
        return args[0], load(args[0]), args[1:]

    def invoke(self, ctx: click.Context) -> object:
        """Whatever a verb does not handle itself: an interrupt is one line and exit code 130."""
        with stoppable():
            return super().invoke(ctx)


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
    _restore_argument_help(command)
    return command


def _restore_argument_help(command: click.Command) -> None:
    """Click 8.5 gives arguments a help of their own and so erases what older typers had put there."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _restore_argument_help(inner)
    elif command.callback is not None:
        declared = get_params_from_function(inspect.unwrap(command.callback))
        for parameter in command.params:
            if isinstance(parameter, TyperArgument) and parameter.name in declared:
                parameter.help = getattr(declared[parameter.name].default, "help", None)
