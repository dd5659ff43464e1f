"""A deployment as an audit sees it: its terms, played on data that are given.

A deployment keeps no messages, its clients' draws are secret, and their data are elsewhere. Its terms say all that
decides what a role sees of a round; so a round with these terms is played here, on data like the clients'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ntkfl.data import Federated, from_clients
from ntkfl.data.npz import read_client
from ntkfl.errors import ConfigError
from ntkfl.federation.build import build_method, load_data
from ntkfl.federation.config import DataConfig, RunConfig
from ntkfl.safe_parse import read_toml
from ntkfl.user_code import refuse_code

_TERMS = ("rounds", "clients_per_round", "seed", "precision", "model", "method")
_CLIENT = re.compile(r"client-(\d+)\.npz")
_TEST = "test.npz"


def settings_file(source: Path) -> Path:
    """The settings of a run, a deployment's run or an aggregator: of a folder, the file in it."""
    if not source.is_dir():
        return source
    found = [source / name for name in ("config.toml", "run.toml") if (source / name).is_file()]
    return found[0] if found else source / "config.toml"


def is_deployment(values: Mapping[str, Any]) -> bool:
    """Whether a run.toml, or the settings in a run's folder, are a deployment's: it states its inputs' shape."""
    return "inputs" in values and "outputs" in values


def plan(source: Path, data: str | None, *, allow_code: bool) -> tuple[RunConfig, Federated]:
    """A simulation of the deployment with these settings, and the clients' data: a folder as `ntkfl data deal` makes,
    or a dataset as `ntkfl train` takes.
    """
    values = read_toml(source)
    if data is None:
        raise ConfigError(f"{source} is of a deployment, and its clients' data are not there: {_advice(source)}")
    try:
        own = {name: values[name] for name in _TERMS if name in values}
        dataset = None if Path(data).is_dir() else DataConfig(dataset=data, clients=int(values.get("clients", 2)))
        config = RunConfig(**own, **({} if dataset is None else {"data": dataset}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source} cannot be read as a deployment's settings: {error}") from None
    if not allow_code:
        refuse_code([name for name in config.code if name != data], str(source))
    method = build_method(config.method)
    if method.shuffle and "max_rows" in values:  # a client sends so many, padding among them
        config = config.model_copy(update={"method": config.method | {"rows_per_client": values["max_rows"]}})
    fed = _dealt(Path(data), values["outputs"]) if dataset is None else load_data(config)
    if tuple(fed.input_shape) != tuple(values["inputs"]) or fed.output_dim != values["outputs"]:
        there = f"inputs {list(fed.input_shape)} and {fed.output_dim} outputs"
        raise ConfigError(f"{data} has {there}, the deployment {values['inputs']} and {values['outputs']}")
    if len(fed) < config.clients_per_round:
        raise ConfigError(f"{data} has {len(fed)} clients, and a round asks {config.clients_per_round}")
    return config, fed


def _dealt(folder: Path, outputs: int) -> Federated:
    found = {int(match[1]): path for path in folder.iterdir() if (match := _CLIENT.fullmatch(path.name))}
    if not found or not (folder / _TEST).is_file():
        raise ConfigError(f"{folder} has no client-0.npz … and {_TEST}: `ntkfl data deal` makes such a folder")
    clients, test = [read_client(found[number]) for number in sorted(found)], read_client(folder / _TEST)
    real = test[1].is_floating_point()
    return from_clients(clients, test=test, classes=None if real else outputs, name=str(folder))


def _advice(source: Path) -> str:
    what = "give --data, a folder of client-0.npz … and test.npz (ntkfl data deal), or a dataset as for ntkfl train"
    near = next((parent / "data" for parent in source.parents[:3] if (parent / "data" / _TEST).is_file()), None)
    return f"{what}; here: --data {near}" if near else what
