"""Two pages of the documentation site, made from the schemas: options of every method, settings of a run."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from ntkfl.data.partitions import PARTITIONS
from ntkfl.federation.byzantine import ATTACKS, Byzantine
from ntkfl.federation.config import DataConfig, ModelConfig, RunConfig
from ntkfl.methods import METHODS, Method, Privacy, Robust
from ntkfl.options import Options

_KINDS = {int: "integer", float: "number", bool: "true or false", str: "text"}
_SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
# What a partition calls otherwise than the table [data] does.
_IN_DATA = {"per_client": "shards_per_client"}


def method_options() -> str:
    """The page of every method's options: first those that all share, then each method's own."""
    shared = Method.model_fields
    parts = [
        "# Options of methods\n\nEvery option of every method, from the schemas that check them. On the command line: "
        "`--set OPTION=VALUE`, or a flag where [`ntkfl train`](commands.md#ntkfl-train) has one. In a TOML: in the "
        "table `[method]`. In Python: an argument of the class. What they do together: [methods](methods.md).\n",
        "\n## Shared by all methods\n\nA method that differs from these repeats the option in its own table.\n\n",
        _table(shared.items()),
    ]
    for name, method in METHODS.items():
        own = [
            (o, field)
            for o, field in method.model_fields.items()
            if o not in shared or _row(o, field) != _row(o, shared[o])
        ]
        said = (inspect.getdoc(method) or "").split("\n\n")[0]
        parts.append(f"\n## {name}\n\n[`ntkfl.methods.{method.__name__}`][ntkfl.methods.{method.__name__}]\n\n")
        parts.append(f"{said}\n\n{_table(own)}")
    return "".join(parts)


def run_settings() -> str:
    """The page of what a run's TOML holds besides the method: the run, its data and partitions, its model."""
    of_run = [(name, field) for name, field in RunConfig.model_fields.items() if _plain(field)]
    parts = [
        "# Settings of a run\n\nEverything that the `config.toml` of a run may hold, from the schemas that check it. "
        "Most have a flag of [`ntkfl train`](commands.md#ntkfl-train) too. The table `[method]` has a page of its own, "
        "[options of methods](options.md). What a run writes: [runs](compare.md).\n",
        f"\n## The run\n\nAt the top of the file.\n\n{_table(of_run)}",
        f"\n## Data\n\nThe table `[data]`.\n\n{_table(DataConfig.model_fields.items())}",
        "\n## Partitions\n\nHow a dataset is dealt to clients: `partition` of `[data]`, or the class in Python.\n",
    ]
    for kind, partition in PARTITIONS.items():
        said = (inspect.getdoc(partition) or "").strip()
        name = f"ntkfl.data.{partition.__name__}"
        parts.append(f"\n### {kind}\n\n[`{name}`][{name}]\n\n{said}\n\n{_partition(partition)}")
    parts += [
        f"\n## Model\n\nThe table `[model]`.\n\n{_table(ModelConfig.model_fields.items())}",
        f"\n## Privacy\n\nThe table `[privacy]`.\n\n{_table(Privacy.model_fields.items())}",
        '\n## Robustness\n\nThe table `[robust]`; `robust = "on"` is every bound there is for the method.\n\n',
        _table(Robust.model_fields.items()),
        "\n## Byzantine clients\n\nThe table `[byzantine]`, in simulations.\n\n",
        _table(Byzantine.model_fields.items()),
        "\n| attack | what such a client does |\n| --- | --- |\n",
        *(f"| `{name}` | {_cell(said)} |\n" for name, said in ATTACKS.items()),
    ]
    return "".join(parts)


def values(field: FieldInfo) -> str:
    """What an option may be: its type and its bounds."""
    annotation = field.annotation
    inner = [a for a in get_args(annotation) if a is not NoneType] if _is_union(annotation) else [annotation]
    names = " or ".join(dict.fromkeys(_kind(a) for a in inner))
    bounds = [f"{_SIGNS[sign]} {getattr(m, sign)}" for m in field.metadata for sign in _SIGNS if hasattr(m, sign)]
    return " ".join([names, " and ".join(bounds)]).strip()


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {_kind(get_args(annotation)[0])}s"
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) is dict or (isinstance(annotation, type) and issubclass(annotation, Options)):
        return "table"
    return _KINDS.get(annotation, "function")


def _table(options: Iterable[tuple[str, FieldInfo]]) -> str:
    head = "| option | values | default | meaning |\n| --- | --- | --- | --- |\n"
    return head + "".join(_row(name, field) for name, field in options)


def _row(name: str, field: FieldInfo) -> str:
    return f"| `{name}` | {values(field)} | {_default(field)} | {_cell(field.description or '')} |\n"


def _partition(partition: type) -> str:
    described = DataConfig.model_fields
    rows = []
    for field in fields(partition):
        setting = _IN_DATA.get(field.name, field.name)
        default = "required" if field.default is MISSING else _shown(field.default)
        rows.append(f"| `{field.name}` | `{setting}` | {default} | {_cell(described[setting].description or '')} |\n")
    head = "| in Python | in `[data]` | default in Python | meaning |\n| --- | --- | --- | --- |\n"
    return head + "".join(rows) if rows else "No options.\n"


def _default(field: FieldInfo) -> str:
    if isinstance(field.json_schema_extra, dict) and "default" in field.json_schema_extra:
        return str(field.json_schema_extra["default"])  # one that whoever reads the file fills in
    if field.is_required():
        return "required"
    return _shown(field.get_default(call_default_factory=True))


def _shown(value: object) -> str:
    if value is None or value == {}:
        return "none"
    if isinstance(value, Options):
        return "its defaults"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _plain(field: FieldInfo) -> bool:
    """Not a table of its own."""
    kinds = (*get_args(field.annotation), field.annotation)
    return field.description is not None and not any(isinstance(k, type) and issubclass(k, Options) for k in kinds)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)
