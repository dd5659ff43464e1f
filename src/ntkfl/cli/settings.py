"""Settings of a run on the command line: `--set NAME=VALUE`, and what `--private` sets and refuses."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any

from ntkfl.errors import ConfigError
from ntkfl.options import NONE
from ntkfl.progress import plural
from ntkfl.safe_parse import parse_toml

TABLES = ("data", "model", "method", "privacy", "robust")


def put(settings: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set what the path leads to, through tables that are made where they are missing."""
    *tables, name = path
    for table in tables:
        inner = settings.get(table)
        settings[table] = inner if isinstance(inner, dict) else {}
        settings = settings[table]
    settings[name] = value


def assign(settings: dict[str, Any], given: Sequence[str]) -> None:
    """Put each NAME=VALUE where it belongs in the settings of a run, whose method is named already.

    A name is that of a setting of the run, its data, model, method, privacy or bounds; dots say which, and lead into
    tables: `lr=0.1`, `model.hidden=[64]`, `model.options.width=32`.
    """
    for text in given:
        path, value = parse_setting(text)
        put(settings, path if len(path) > 1 else _find(path[0], settings["method"]), value)


def parse_setting(text: str) -> tuple[list[str], Any]:
    """The parts of NAME, and VALUE as TOML has it; what is no TOML is a word."""
    name, equals, value = text.partition("=")
    path = name.strip().replace("-", "_").split(".")
    if not equals or not all(path):
        raise ConfigError(f"--set {text[:80]!r} has no value: write NAME=VALUE, such as --set lr=0.1")
    try:
        found = parse_toml(f"value = {value}")
    except ValueError:
        return path, value
    return path, found["value"] if found.keys() == {"value"} else value


def _find(name: str, method: dict[str, Any]) -> list[str]:
    """The path of a setting that is given by its name alone."""
    from ntkfl.federation.config import DataConfig, ModelConfig, RunConfig, method_class
    from ntkfl.methods import METHODS, Privacy, Robust
    from ntkfl.options import Options

    kinds: dict[tuple[str, ...], type[Options]]
    kinds = {(): RunConfig, ("data",): DataConfig, ("model",): ModelConfig, ("method",): method_class(method)}
    kinds |= {("privacy",): Privacy, ("robust",): Robust}
    places = [[*table, name] for table, kind in kinds.items() if name in kind.model_fields and name not in TABLES]
    if ["method", name] in places:  # what other tables have of that name does not concern this method
        return ["method", name]
    if len(places) == 1:
        return places[0]
    if places or name in TABLES:
        whole = " or ".join(".".join(path) for path in places) or f"{name}.NAME"
        raise ConfigError(f"--set {name} could mean several settings: write {whole}")
    if owners := [other.name for other in METHODS.values() if name in other.model_fields]:
        raise ConfigError(f"{method['name']} has no option {name!r}; these methods have: {', '.join(owners)}")
    names = {own for kind in kinds.values() for own in kind.model_fields} - {*TABLES}
    near = difflib.get_close_matches(name, sorted(names), n=3)
    own = ", ".join(kinds["method",].model_fields)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"its own are {own}; docs/compare.md has all"
    raise ConfigError(f"unknown option {name!r} for a run with {method['name']}: {hint}")


# -- Private runs -----------------------------------------------------------------------------------------------------

PRIVATE = ("private-sums", "private-ridge")
RIDGE = "private-ridge"  # spends ε in one round
ROUNDS = 20
HONEST = 0.9  # part of a round's clients whose noise the promise counts on


def private_name(name: str | None) -> str:
    """The method of a private run: `sum-ridge` becomes its private form."""
    return RIDGE if name == "sum-ridge" else name or PRIVATE[0]


def _clients(given: dict[str, Any], data: dict[str, Any]) -> int:
    """All clients that there will be; those of a file or of a user's function are counted."""
    from ntkfl.data.files import is_own
    from ntkfl.federation.config import RunConfig, load_data
    from ntkfl.user_code import is_code

    name = data.get("dataset", "")
    if not (is_own(name) or is_code(name)):
        return int(data.get("clients", 300))
    return len(load_data(RunConfig(**(given | {"method": {"name": "fedavg"}, "privacy": {}}))))


def private_settings(given: dict[str, Any]) -> dict[str, Any]:
    """The settings with what privacy needs beside them: secure sums, all clients in each round, ε = 3 at δ = 1e-5, with
    the noise of nine in ten clients counted on.

    `ConfigError` for a setting that would void the promise.
    """
    data, method, own = given.get("data", {}), dict(given.get("method", {})), dict(given.get("privacy", {}))
    name = method["name"] = private_name(method.get("name"))
    for void, why in (
        (name not in PRIVATE, f"trains with {' or '.join(PRIVATE)}, not {name}: add --method {PRIVATE[0]}"),
        (own.get("secure_sum") is False, "sums replies under masks: leave secure_sum as it is"),
        (own.get("epsilon", 3.0) in (None, NONE), "needs an epsilon"),
        (own.get("shuffle"), "sums replies under masks, and there are no rows to shuffle: leave shuffle out"),
        (given.get("hold_out"), "protects all clients: hold_out gives the server those that it measures on"),
        (given.get("byzantine"), "counts on the noise of honest clients: leave byzantine out"),
    ):
        if void:
            raise ConfigError(f"--private {why}")
    rounds = given.get("rounds", 1 if name == RIDGE else ROUNDS)
    if "clients_per_round" not in given and data.get("partition", "dirichlet") in ("writer", "client"):
        raise ConfigError("--private needs --clients-per-round where the data say how many clients there are")
    cohort = given.get("clients_per_round") or _clients(given, data)
    private: dict[str, Any] = {
        "secure_sum": True,
        "epsilon": 3.0,
        "delta": 1e-5,
        "noise_clients": max(1, math.ceil(HONEST * cohort)),
        "budget_rounds": 1 if name == RIDGE else rounds,
    } | own
    if (most := private["budget_rounds"]) < rounds:
        raise ConfigError(f"--private: ε is for {plural(most, 'round')}, and the run has {rounds}: add --rounds {most}")
    given = {"repeatable": False} | given  # noise from the operating system, unless somebody wants it again
    return given | {"rounds": rounds, "clients_per_round": cohort, "method": method, "privacy": private}
