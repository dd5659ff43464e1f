"""`--set NAME=VALUE`: any setting of a run on the command line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from ntkfl.errors import ConfigError
from ntkfl.safe_parse import parse_toml

TABLES = ("data", "model", "method", "privacy", "robust")


def assign(settings: dict[str, Any], given: Sequence[str]) -> None:
    """Put each NAME=VALUE where it belongs in the settings of a run, whose method is named already.

    A name is that of a setting of the run, its data, model, method, privacy or bounds; dots say which, and lead into
    tables: `lr=0.1`, `model.hidden=[64]`, `model.options.width=32`.
    """
    for text in given:
        path, value = parse_setting(text)
        *tables, name = path if len(path) > 1 else _find(path[0], settings["method"])
        place = settings
        for table in tables:
            inner = place.get(table)
            place[table] = inner if isinstance(inner, dict) else {}
            place = place[table]
        place[name] = value


def parse_setting(text: str) -> tuple[list[str], Any]:
    """The parts of NAME, and VALUE as TOML has it; what is no TOML is a word."""
    name, equals, value = text.partition("=")
    path = name.strip().replace("-", "_").split(".")
    if not equals or not all(path):
        raise ConfigError(f"--set {text[:80]!r}: expected NAME=VALUE")
    try:
        found = parse_toml(f"value = {value}")
    except ValueError:
        return path, value
    return path, found["value"] if found.keys() == {"value"} else value


def _find(name: str, method: dict[str, Any]) -> list[str]:
    """The path of a setting that is given by its name alone."""
    from ntkfl.federation.config import DataConfig, ModelConfig, RunConfig, method_class
    from ntkfl.methods.robust import Robust
    from ntkfl.options import Options
    from ntkfl.privacy.settings import Privacy

    known: dict[tuple[str, ...], type[Options]]
    known = {(): RunConfig, ("data",): DataConfig, ("model",): ModelConfig, ("method",): method_class(method)}
    known |= {("privacy",): Privacy, ("robust",): Robust}
    places = [[*table, name] for table, kind in known.items() if name in kind.model_fields]
    if ["method", name] in places:  # what other tables have of that name does not concern this method
        return ["method", name]
    if len(places) == 1 and name not in TABLES:
        return places[0]
    if places:
        whole = " or ".join(".".join(path) for path in places if name not in TABLES) or f"{name}.NAME"
        raise ConfigError(f"--set {name}: there are several, say {whole}")
    names = {own for kind in known.values() for own in kind.model_fields} - set(TABLES)
    near = difflib.get_close_matches(name, sorted(names), n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"valid are {', '.join(sorted(names))}"
    raise ConfigError(f"unknown option {name!r} for a run with {method['name']}: {hint}")
