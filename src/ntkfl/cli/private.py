"""`ntkfl train --private`: settings that make a run differentially private, and a refusal of those that would not."""

from __future__ import annotations

import math
from typing import Any

from ntkfl.errors import ConfigError
from ntkfl.options import NONE
from ntkfl.progress import plural

METHODS = ("private-sums", "private-ridge")
RIDGE = "private-ridge"  # spends ε in one round
ROUNDS = 20
HONEST = 0.9  # part of a round's clients whose noise the promise counts on


def private_name(name: str | None) -> str:
    """The method of a private run: `sum-ridge` becomes its private form."""
    return RIDGE if name == "sum-ridge" else name or METHODS[0]


def _not_private(name: str) -> str:
    return f"trains with {' or '.join(METHODS)}, not {name}: leave --method out, or say --method {METHODS[0]}"


def _clients(given: dict[str, Any], data: dict[str, Any]) -> int:
    """All clients that there will be; those of a file or of a user's function are counted."""
    from ntkfl.data.sources import is_own
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
        (name not in METHODS, _not_private(name)),
        (own.get("secure_sum") is False, "sums replies under masks: leave secure_sum as it is"),
        (own.get("epsilon", 3.0) in (None, NONE), "needs an epsilon"),
        (own.get("shuffle"), "sums replies under masks, and there are no rows to shuffle: leave shuffle out"),
        (data.get("overlap"), "protects a record that one client holds: with overlap several hold the same"),
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
    if private["budget_rounds"] < rounds:
        raise ConfigError(f"--private: ε is for {plural(private['budget_rounds'], 'round')}, and the run has {rounds}")
    given = {"repeatable": False} | given  # noise from the operating system, unless somebody wants it again
    return given | {"rounds": rounds, "clients_per_round": cohort, "method": method, "privacy": private}
