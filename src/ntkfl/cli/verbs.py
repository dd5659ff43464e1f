"""The verbs, each imported when it is used: help and completion answer at once, without importing torch."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated

import click
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.utils import get_params_from_function

from ntkfl.cli.stopping import stoppable

# What `ntkfl --help` says of each verb, in that order. A verb `x` is the function `x` of `ntkfl.cli.x`, or its `app`.
# Other packages add theirs: see `added`.
VERBS = {
    "train": "Train one model over many clients.",
    "compare": "Compare methods on equal terms.",
    "new": "Write a small project to edit.",
    "audit": "Attack one round as it goes over the wire.",
    "report": "Show what runs did, or are doing, on one page.",
    "forget": "Take a client out of a run, exactly.",
    "data": "Datasets, and how they are dealt to clients.",
    "keys": "Keys and credentials of a federation.",
    "policy": "What may leave this site, and what has left it.",
    "serve": "Run a federation's key server or shuffler.",
}

METHODS = (
    "sum-ntk-fl", "kfac-fedavg", "ntk-fl", "cp-ntk-fl", "private-sums", "sum-ridge", "private-ridge", "fedavg",
    "fednova", "fedprox", "scaffold", "fedadam", "fedcom", "qsgd", "data-share", "centralized",
)  # fmt: skip
DATASETS = ("fashion-mnist", "mnist", "femnist", "cifar10", "digits")
PARTITIONS = ("dirichlet", "writer", "iid", "shards", "client")
MODELS = ("mlp", "cnn", "resnet", "gru", "transformer")
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="run code that the folder names (package.module:factory): trust its maker")
]

LabelColumn = Annotated[str | None, typer.Option(help="of a table: the column of labels; label if not given")]
ClientColumn = Annotated[
    str | None, typer.Option(help="of a table: the column that says whose a row is; client if not given")
]
SplitColumn = Annotated[str | None, typer.Option(help="of a table: the column of train and test; split if not given")]


@cache
def added() -> dict[str, tuple[str, str]]:
    """Verbs of other installed packages: name → (its line of help, "module:function").

    A package names such a mapping as an entry point of the group `ntkfl.verbs`, in a module that imports nothing. A
    name of two words is a command of one of the verbs here.
    """
    return {name: verb for point in entry_points(group="ntkfl.verbs") for name, verb in point.load().items()}


def listed() -> dict[str, str]:
    """All verbs with their lines of help."""
    return VERBS | {name: line for name, (line, _) in added().items() if " " not in name}


class Verbs(TyperGroup):
    """A group whose commands are imported when one is called, not when they are listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*listed()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """For lists: the verb's name and its line."""
        return TyperCommand(cmd_name, help=listed()[cmd_name]) if cmd_name in listed() else None

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
    app: typer.Typer | None = None
    if name in VERBS:
        module = import_module(f"ntkfl.cli.{name}")
        app, function = getattr(module, "app", None), getattr(module, name, None)
    else:
        function = _function(name)
    if app is None:
        app = typer.Typer(add_completion=False)
        app.command(name)(function)  # type: ignore[type-var]  # a verb without an app is a function
    for own in added():
        if own.startswith(f"{name} "):
            app.command(own.removeprefix(f"{name} "))(_function(own))
    command = typer.main.get_command(app)
    if isinstance(command, TyperGroup) and hasattr(click.exceptions, "NoSuchCommand"):
        command.suggest_commands = False  # that click does so itself
    _restore_argument_help(command)
    return command


def _function(name: str) -> Callable[..., object]:
    module, function = added()[name][1].split(":")
    found: Callable[..., object] = getattr(import_module(module), function)
    return found


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


def coloured(text: str, colour: str) -> str:
    """Text in a colour, unless its reader wants none (https://no-color.org); whoever pipes it gets none either way."""
    return text if os.environ.get("NO_COLOR") else typer.style(text, fg=colour)
