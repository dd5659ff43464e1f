"""Options people write, in Python, TOML or on the command line: checked once, one clear line when they are wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter, Signature
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError
from pydantic._internal._model_construction import ModelMetaclass  # there is no public name for it

from ntkfl.errors import ConfigError

NONE = "none"  # None in a file or on the command line, which have no word of their own for it

# What a value must be, by the type of pydantic's error, whose context has the limits. All else says so by itself.
_MUST_BE = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "callable_type": "a function",
    "dict_type": "a table, [{option}] in a file",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "int_type": "a whole number",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
    "model_type": "a table, [{option}] in a file",
    "string_too_short": "at least {min_length} characters long",
    "string_type": "text",
    "too_short": "at least {min_length} long",
    "tuple_type": "a list",
}


def _signature(kind: type[BaseModel]) -> Signature:
    """The options with types and defaults. Pydantic's own, with all bounds in it, comes late: with a class's schema."""
    found = []
    for name, field in kind.model_fields.items():
        default = Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)
        found.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=field.annotation))
    return Signature(found)


class _Annotated(ModelMetaclass):
    """Of classes with options: one that lacks a type, as in `lr = 0.5`, is told in our words."""

    __signature__ = property(_signature, lambda kind, its: None)  # what pydantic would put in its place

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **settings: Any) -> type:
        try:
            return super().__new__(mcs, name, bases, namespace, **settings)
        except PydanticUserError as error:
            missing = [own for own in namespace if f"`{own} =" in str(error) or f"Field {own!r}" in str(error)]
            if not missing:
                raise
            kind = type(namespace[missing[0]]).__name__
            raise ConfigError(
                f"{name}: option {missing[0]!r} needs a type: write `{missing[0]}: {kind} = …`, "
                f"or `{missing[0]}: ClassVar[{kind}] = …` for a constant"
            ) from None


class Options(BaseModel, metaclass=_Annotated):
    """Immutable, strict about names; a wrong value is a `ConfigError` of one line that names the option. The word
    "none" is None for an option that may be None and is no text.

    A class may be called otherwise in errors: `class DataConfig(Options, title="[data]")`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:  # an option may be called self
        for name in [name for name, value in values.items() if isinstance(value, str) and value == NONE]:
            types = get_args(field.annotation) if (field := type(self).model_fields.get(name)) else ()
            if NoneType in types and str not in types:
                values[name] = None
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_one_line(type(self), error, values)) from None
        except PydanticUserError as error:  # of the class, whose schema is built when it is first used
            kinds = "bool, int, float, str, Literal, and tuples and dicts of these"
            raise ConfigError(
                f"{type(self).__name__} has an option of a type that no file can hold: take {kinds}"
            ) from error


@contextmanager
def read_from(path: Path) -> Iterator[None]:
    """Options in this block come out of a file: errors begin with its name."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from None


def written(options: Options) -> dict[str, Any]:
    """The options in types that JSON has. None is the word "none" where it is not the default: files leave None out."""
    fields, values = type(options).model_fields, options.model_dump(mode="json")
    return {
        name: NONE if value is None and fields[name].default is not None else value for name, value in values.items()
    }


def _one_line(kind: type[Options], error: ValidationError, values: Mapping[str, Any]) -> str:
    """The first error in our words: which option of which table, what it must be, and what it is."""
    errors, title = error.errors(), kind.model_config.get("title") or kind.__name__
    first = errors[0]
    where, name = "", str(first["loc"][0]) if first["loc"] else ""
    given: Any = values
    for part in first["loc"]:  # behind the option stand keys and places inside its value, and of a union the kinds
        inside = part in given if isinstance(given, Mapping) else isinstance(given, list | tuple) and type(part) is int
        if where and not inside:
            break
        where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else part
        given = given[part] if inside else None
    if first["type"] == "extra_forbidden":
        names = list(kind.model_fields)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]!r}?" if near else f"valid are {', '.join(sorted(names))}"
        return f"unknown option {where!r} for {title}: {hint}"
    if first["type"] == "missing":
        meant = kind.model_fields[name].description if where == name else None
        return f"option {where!r} is missing for {title}" + (f": {meant}" if meant else "")
    if first["type"] in ("value_error", "assertion_error"):
        message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        return f"option {where!r}: {message}" if where else message
    alike = [e for e in errors if e["loc"][:1] == first["loc"][:1]]  # more than one of a union: it may be any of them
    needed = dict.fromkeys(_must_be(kind, name, e["type"], e["msg"], e.get("ctx", {})) for e in alike)
    shown = repr(first["input"])
    return f"option {where!r} must be {' or '.join(needed)}, not {shown if len(shown) < 80 else shown[:77] + '…'}"


def _must_be(kind: type[Options], name: str, type: str, message: str, limits: Mapping[str, Any]) -> str:
    """What a value must be. Of a pattern its option's description says it: a regular expression is for nobody."""
    if type == "string_pattern_mismatch":
        return (kind.model_fields[name].description or "another word").partition(";")[0]
    return _MUST_BE[type].format(option=name, **limits) if type in _MUST_BE else f"{message[:1].lower()}{message[1:]}"
