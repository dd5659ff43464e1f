"""Options people write, in Python, TOML or on the command line: checked once, one clear line when they are wrong."""

from __future__ import annotations

import difflib
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from ntkfl.errors import ConfigError

NONE = "none"  # None in a file or on the command line, which have no word of their own for it


class Options(BaseModel):
    """Immutable, strict about names; a wrong value is a `ConfigError` of one line that names the option. The word
    "none" is None for an option that may be None and is no text.
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
            raise ConfigError(_one_line(type(self), error)) from None


def written(options: Options) -> dict[str, Any]:
    """The options in types that JSON has. None is the word "none" where it is not the default: files leave None out."""
    fields, values = type(options).model_fields, options.model_dump(mode="json")
    return {
        name: NONE if value is None and fields[name].default is not None else value for name, value in values.items()
    }


def _one_line(kind: type[Options], error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or kind.__name__
    if first["type"] == "extra_forbidden":
        names = list(kind.model_fields)
        near = difflib.get_close_matches(str(first["loc"][-1]), names, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]!r}?" if near else f"valid are {', '.join(sorted(names))}"
        return f"unknown option {where!r} for {kind.__name__}: {hint}"
    message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    shown = repr(first.get("input"))
    if first["type"] == "value_error" and not first["loc"]:
        return message
    return f"option {where!r}: {message[:1].lower()}{message[1:]}, got {shown if len(shown) < 80 else shown[:77] + '…'}"
