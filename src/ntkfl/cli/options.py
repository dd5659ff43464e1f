"""Option values that are more than one word or number."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ntkfl.errors import ConfigError
from ntkfl.tangent import PAPER_STEPS

_MOST_STEPS = 10_000


def parse_steps(text: str) -> tuple[float, ...]:
    """'paper', 'a,b,c' or 'first:last:stride' (last included)."""
    if text == "paper":
        return tuple(float(t) for t in PAPER_STEPS)
    if ":" not in text:
        return parse_numbers("steps", text, float)
    parts = parse_numbers("steps", text.replace(":", ","), float)
    if len(parts) != 3 or parts[2] <= 0 or parts[1] < parts[0]:
        raise ConfigError(f"--steps {text!r}: a range is first:last:stride, for example 100:2000:100")
    first, last, stride = parts
    if not (last - first) / stride < _MOST_STEPS:  # nor where one of them is no number
        raise ConfigError(f"--steps {text!r}: a range gives at most {_MOST_STEPS:,} steps")
    return tuple(first + i * stride for i in range(int((last - first) / stride + 1e-9) + 1))


def parse_words(text: str) -> tuple[str, ...]:
    """Words separated by commas."""
    return tuple(text.split(","))


def parse_numbers(name: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    """Numbers separated by commas."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--{name} {text!r}: expected numbers separated by commas") from None


def parse_setting(text: str) -> tuple[str, Any]:
    """OPTION=VALUE; the value as JSON where it is JSON (numbers, true, lists), else a word."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--set {text!r}: expected OPTION=VALUE")
    try:
        return name.replace("-", "_"), json.loads(value)
    except (ValueError, RecursionError):
        return name.replace("-", "_"), value


def parse_byzantine(text: str) -> dict[str, Any]:
    """KIND:FRACTION or KIND:FRACTION:SCALE."""
    kind, *numbers = text.split(":")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    if len(values) not in (1, 2):
        raise ConfigError(f"--byzantine {text!r}: expected KIND:FRACTION or KIND:FRACTION:SCALE, e.g. sign-flip:0.2:5")
    return {"kind": kind} | dict(zip(("fraction", "scale"), values, strict=False))
