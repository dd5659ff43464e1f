"""The options of `ntkfl train`, made from the schemas of its settings.

Importing those takes seconds, which `--help` and completion should not: `train_flags.py` keeps what they come to, and a
test holds it to them. After a change of the schemas, `python -m ntkfl.cli.flags` writes it anew.
"""

from __future__ import annotations

import inspect
import pprint
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Union, get_args, get_origin

import typer

from ntkfl.cli.verbs import DATASETS, METHODS, MODELS, PARTITIONS, one_of

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_DATA, _MODEL, _BACKBONE = "Data and clients", "Model", "A pretrained backbone"
_METHOD, _HIDING, _RUN = "Method", "What clients hide", "Run"
# Of a method's many options, those that have a flag; all others are given by --set.
_METHODS_OWN = {
    _METHOD: ("kernel", "scheme", "steps", "average", "lr", "local_steps", "batch_size", "loss"),
    _HIDING: ("subsample_rate", "projected_dim", "sparsity", "values", "shuffle", "secure_sum", "codec"),
}
# Where a command line has a form of its own, or methods describe one option differently.
_SAID = {
    "model.hidden": "hidden widths of an mlp, e.g. 200,100 (default 100)",
    "model.head": "hidden widths of its head, e.g. 128 (default: none, linear)",
    "model.trainable": "what trains, e.g. 'head,layer4.*' (default head)",
    "model.lora": "its linear layers that get adapters, e.g. '*.query'",
    "model.also": "submodules whose pooled inputs are features too, e.g. 'blocks.6'",
    "method.steps": "candidate t: 'paper', '100,200,400' or '100:2000:100'",
    "method.lr": "learning rate",
    "method.local_steps": "local steps of averaging methods",
    "method.batch_size": "local batch size",
    "byzantine": "clients that corrupt what they reply, KIND:FRACTION[:SCALE], e.g. sign-flip:0.2:5",
}
_COMPLETED = {"data.dataset": DATASETS, "data.partition": PARTITIONS, "model.name": MODELS, "method.name": METHODS}
_TYPES: dict[str, Any] = {"text": str | None, "integer": int | None, "number": float | None, "switch": bool | None}


class Flag(NamedTuple):
    """One setting on the command line: "data.alpha" is `alpha` of the table [data]."""

    setting: str
    kind: str  # text, integer, number or switch; "integer or none", "number or none"
    help: str
    panel: str

    @property
    def parameter(self) -> str:
        """Its name as a parameter: names of data, model and method are called by what they name."""
        table, _, name = self.setting.rpartition(".")
        return table if table and name == "name" else name


def with_flags(flags: tuple[Flag, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the function's `**given` becomes an option for each flag, as typer reads signatures."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        made = {flag.parameter: _option(flag) for flag in flags}
        keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
        added = [inspect.Parameter(name, keyword, default=None, annotation=made[name]) for name in made]
        function.__signature__ = signature.replace(parameters=[*added, *own])  # type: ignore[attr-defined]
        function.__annotations__ = {**function.__annotations__, **made}
        return function

    return add


def _or_none(kind: str) -> Callable[[str], Any]:
    """A parser of numbers of that kind, and of the word none, which stays a word until the settings are checked."""
    number = int if kind == "integer" else float

    def parse(text: str) -> Any:
        try:
            return text if text == "none" else number(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not a valid {kind}, nor none.") from None

    return parse


def _option(flag: Flag) -> Any:
    names = _COMPLETED.get(flag.setting)
    kind, _, or_none = flag.kind.partition(" ")
    option = typer.Option(
        help=flag.help,
        rich_help_panel=flag.panel,
        autocompletion=one_of(names) if names else None,
        parser=_or_none(kind) if or_none else None,
        metavar=f"{kind}|none".upper() if or_none else None,
    )
    return Annotated[_TYPES[kind], option]


def nested(flags: tuple[Flag, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, as a configuration has it; what was not is left out."""
    settings: dict[str, Any] = {"data": {}, "model": {}, "method": {}}
    for flag in flags:
        value = given[flag.parameter]
        if value is not None:
            table, _, name = flag.setting.rpartition(".")
            (settings[table] if table else settings)[name] = value
    return settings


def from_schemas() -> tuple[Flag, ...]:
    """Every setting of a run, and those of the methods that have a flag, with the descriptions of their schemas."""
    from ntkfl import methods
    from ntkfl.federation.config import PRETRAINED, DataConfig, ModelConfig, RunConfig

    flags = [_flag(f"data.{name}", field, _DATA) for name, field in DataConfig.model_fields.items()]
    for name, field in ModelConfig.model_fields.items():
        if name != "options":
            flags.append(_flag(f"model.{name}", field, _BACKBONE if name in PRETRAINED else _MODEL))
    flags.append(
        Flag("method.name", "text", f"{', '.join(METHODS)} (default {METHODS[0]}), or package.module:Class", _METHOD)
    )
    kinds: list[Any] = [methods.Method, *(methods.METHODS[name] for name in METHODS)]
    for panel, names in _METHODS_OWN.items():
        for name in names:
            found = [kind.model_fields[name] for kind in kinds if name in kind.model_fields]
            shared = len({repr(field.default) for field in found}) == 1
            flags.append(_flag(f"method.{name}", found[0], panel, shared))
    tables = ("data", "model", "method")
    flags += [_flag(name, field, _RUN) for name, field in RunConfig.model_fields.items() if name not in tables]
    return tuple(flags)


def _flag(setting: str, field: FieldInfo, panel: str, say_default: bool = True) -> Flag:
    kinds = {str: "text", int: "integer", float: "number", bool: "switch"}
    types = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else (field.annotation,)
    kind = next((kinds[one] for one in types if one in kinds), "text")
    kind += " or none" if NoneType in types and kind in ("integer", "number") else ""
    default = field.default if say_default and kind != "switch" and field.default is not None else None
    text = _SAID.get(setting) or (field.description or "") + (f" (default {default})" if default is not None else "")
    return Flag(setting, kind, text, panel)


def module_text() -> str:
    """The content of `train_flags.py`."""
    rows = pprint.pformat([tuple(flag) for flag in from_schemas()], width=100)
    return (
        '"""Options of `ntkfl train`, written by `python -m ntkfl.cli.flags` from the schemas of its settings."""\n\n'
        f"from ntkfl.cli.flags import Flag\n\nFLAGS = tuple(\n    Flag(*row)\n    for row in {rows}\n)\n"
    )


if __name__ == "__main__":
    Path(__file__).with_name("train_flags.py").write_text(module_text())
