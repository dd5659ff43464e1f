"""The verbs, each loaded when it is used: help and completion answer at once, without importing torch."""

from __future__ import annotations

import difflib
import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Any

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
    "report": "Show what runs did on one page.",
    "watch": "Watch runs while they go on.",
    "forget": "Take a client out of a run, exactly.",
    "data": "Datasets, and how they are dealt to clients.",
    "doctor": "Check this machine, and say what to do.",
    "export": "Write a run's model, to use elsewhere.",
    "keys": "Keys, tokens and certificates of a federation.",
    "deploy": "Try a federation out.",
    "serve": "Run a federation's key server or shuffler.",
    "aggregate": "Run the server that trains, behind the shuffler.",
    "flower": "Clients on other machines, with Flower.",
    "join": "Take part in a run, with data of your own.",
}

METHODS = (
    "ntk-fl", "cp-ntk-fl", "sum-ntk-fl", "private-sums", "sum-ridge", "private-ridge", "fedavg", "fednova", "fedprox",
    "scaffold", "fedadam", "fedcom", "qsgd", "dp-fedavg", "data-share", "centralized",
)  # fmt: skip
DATASETS = ("fashion-mnist", "mnist", "femnist", "cifar10", "digits")
PARTITIONS = ("dirichlet", "writer", "iid", "shards", "client")
MODELS = ("mlp", "cnn", "resnet", "gru", "transformer", "random-features")
LogFormat = Annotated[
    str,
    typer.Option(click_type=click.Choice(["plain", "json"]), help="One line per round and per problem, in this form."),
]
LogLevel = Annotated[
    str, typer.Option(click_type=click.Choice(["debug", "info", "warning"]), help="debug logs every request too.")
]
Metrics = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Serve Prometheus metrics there, for the operator alone.")
]
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

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Options of completion are for those who read of them: lines less on the first screen."""
        found = super().get_params(ctx)
        for parameter in found:
            if {"--show-completion", "--install-completion"} & {*parameter.opts}:
                parameter.hidden = True  # type: ignore[attr-defined]
        return found

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """How to call it, what it is and the verbs, without headings: all of them fit a screen of 24 lines."""
        formatter.write_usage(ctx.command_path, "VERB [OPTIONS] [ARGS]...")
        formatter.write(f"{self.help}\n\n")
        with formatter.indentation():
            formatter.write_dl([*listed().items()])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*listed(), *(name for name in super().list_commands(ctx) if name not in VERBS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """For lists: the verb's name and its line."""
        if cmd_name in listed():
            return TyperCommand(cmd_name, help=listed()[cmd_name])
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> object:
        """Whatever a verb does not handle itself: an interrupt is one line and exit code 130."""
        with stoppable():
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """For use: the verb itself."""
        if args and not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            ctx.fail(f"no verb {args[0]!r}{f': did you mean {near[0]!r}?' if near else ''}")
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if name in listed() else command, rest


@contextmanager
def importing() -> Iterator[None]:
    """Around imports, before anything is computed: no garbage collection, now or later, of what modules are made of.

    It would go through all of torch's objects a dozen times, a quarter of a second in sum, and find nothing to free.
    Where torch is loaded already, somebody else's objects may be garbage by now: nothing is done.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@cache
def load(name: str) -> click.Command:
    """The verb's command, with its options."""
    with importing():
        if name in VERBS:
            module = import_module(f"ntkfl.cli.{name}")
            app = getattr(module, "app", None) or _alone(name, getattr(module, name))
        else:
            app = _alone(name, _function(name))
        for own in added():
            if own.startswith(f"{name} "):
                app.command(own.removeprefix(f"{name} "))(_function(own))
    command = typer.main.get_command(app)
    if isinstance(command, TyperGroup) and hasattr(click.exceptions, "NoSuchCommand"):
        command.suggest_commands = False  # that click does so itself
    _restore_argument_help(command)
    _escape_markup(command)
    return command


def _alone(name: str, function: Callable[..., object]) -> typer.Typer:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name)(function)
    return app


def _function(name: str) -> Callable[..., object]:
    module, function = added()[name][1].split(":")
    found: Callable[..., object] = getattr(import_module(module), function)
    return found


def _escape_markup(command: click.Command) -> None:
    """Help is plain text: where it says [model] it means that, and not a style, as which rich would leave it out."""
    from rich.markup import escape

    described: list[Any] = [command, *command.params]
    for one in described:
        if getattr(one, "help", None):
            one.help = escape(one.help)
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _escape_markup(inner)


def _restore_argument_help(command: click.Command) -> None:
    """Click 8.5 gives arguments a help of their own and so erases what older typers had put there."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _restore_argument_help(inner)
    elif command.callback is not None:
        declared = get_params_from_function(inspect.unwrap(command.callback))
        for parameter in command.params:
            if isinstance(parameter, TyperArgument) and parameter.help is None and parameter.name in declared:
                parameter.help = getattr(declared[parameter.name].default, "help", None)


def one_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Completion of an option's value."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def coloured(text: str, colour: str) -> str:
    """Text in a colour, unless its reader wants none (https://no-color.org); whoever pipes it gets none either way."""
    return text if os.environ.get("NO_COLOR") else typer.style(text, fg=colour)
