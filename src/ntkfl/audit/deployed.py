"""A deployment as an audit sees it: its terms, played on data that are given.

A deployment keeps no messages, its clients' draws are secret, and their data are elsewhere. Its terms say all that
decides what a role sees of a round; so a round with these terms is played here, on data like the clients'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from ntkfl.data import Federated, from_clients
from ntkfl.data.npz import read_client
from ntkfl.deployment.contract import Terms
from ntkfl.errors import ConfigError
from ntkfl.federation.build import build_method, load_data
from ntkfl.federation.config import DataConfig, RunConfig, method_code
from ntkfl.safe_parse import read_toml
from ntkfl.user_code import refuse_code

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


class _Settings(Terms):
    """What an audit needs of a deployment's settings."""

    rounds: int = Field(1, ge=1)
    clients_per_round: int = Field(ge=1)
    clients: int = Field(ge=1)
    seed: int = Field(0, ge=0)
    max_rows: int | None = Field(None, ge=1)

    @property
    def code(self) -> list[str]:
        return [*self.model.code, *method_code(self.method)]


def read_settings(source: Path, *, allow_code: bool) -> _Settings:
    """From a run.toml, or the config.toml of a deployment's run; code that it names is refused unless allowed."""
    values = read_toml(source)
    settings = _Settings(**{name: values[name] for name in _Settings.model_fields if name in values})
    if not allow_code:
        refuse_code(settings.code, str(source))
    return settings


def plan(source: Path, data: str | None, *, allow_code: bool) -> tuple[RunConfig, Federated]:
    """A simulation of the deployment with these settings, and the clients' data: a folder as `ntkfl data deal` makes,
    or a dataset as `ntkfl train` takes.
    """
    settings = read_settings(source, allow_code=allow_code)
    if data is None:
        raise ConfigError(f"{source} is of a deployment, and its clients' data are not there: {_advice(source)}")
    method = settings.method
    if settings.max_rows and build_method(method).shuffle:  # a client sends so many, padding among them
        method = method | {"rows_per_client": settings.max_rows}
    # In float32, whatever the deployment's precision: the attacks are made for it, and last digits change nothing.
    own = {name: getattr(settings, name) for name in ("rounds", "clients_per_round", "seed", "model")}
    if Path(data).is_dir():
        config, fed = RunConfig(**own, method=method), _dealt(Path(data), settings.outputs)
    else:
        config = RunConfig(**own, method=method, data=DataConfig(dataset=data, clients=settings.clients))
        fed = load_data(config)
    if (tuple(fed.input_shape), fed.output_dim) != (settings.inputs, settings.outputs):
        there = f"inputs {list(fed.input_shape)} and {fed.output_dim} outputs"
        raise ConfigError(f"{data} has {there}, the deployment {list(settings.inputs)} and {settings.outputs}")
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
