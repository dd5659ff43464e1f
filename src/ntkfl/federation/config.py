"""A run as people write it down, names and numbers in TOML; and what they name: data, network and method.

`RunConfig` has the tables `[data]` and `[model]` as classes of their own. `load_data`, `build_model` and `build_method`
make objects of them, once per run, and `spelled_out` writes every setting into the run's folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from ntkfl.data import NAMES, Federated
from ntkfl.data.files import FORMS, is_data_file, is_own, open_dataset
from ntkfl.data.partitions import PARTITIONS, ByClient, Partition
from ntkfl.errors import ConfigError, unknown
from ntkfl.federation.byzantine import Byzantine
from ntkfl.federation.client import derive
from ntkfl.methods import METHODS, Method
from ntkfl.methods.base import settle
from ntkfl.methods.robust import Robust
from ntkfl.models import MODELS, digest, head
from ntkfl.options import NONE, Options, read_from, written
from ntkfl.privacy.settings import Privacy
from ntkfl.safe_parse import read_toml
from ntkfl.tangent.losses import loss_name
from ntkfl.user_code import find_factory, is_code, refuse_code
from ntkfl.version import __version__

DEFAULT_METHOD = "sum-ntk-fl"
# What a run's config.toml says besides its settings.
NOTED = ("ntkfl", "shape", "promises", "names", "standardization", "constant", "fingerprint")


class DataConfig(Options, title="[data]"):
    """Which data, and how they are dealt to clients."""

    dataset: str = Field(
        "fashion-mnist",
        description=f"{', '.join(NAMES)}, FILE.csv, .parquet or .npz, a folder, or package.module:function",
    )
    partition: str = Field("dirichlet", description=", ".join(PARTITIONS))
    clients: int = Field(300, ge=1, description="clients in all")
    alpha: float = Field(0.1, gt=0, description="Dirichlet concentration, above 0: smaller is more heterogeneous")
    shards_per_client: int = Field(2, ge=1, description="of partition shards")
    min_samples: int = Field(16, ge=1, description="of partition writer: those with fewer samples are left out")
    standardize: bool = Field(
        False, description="inputs to mean 0 and deviation 1 by feature or channel, from sums that clients tell once"
    )
    mean: tuple[float, ...] | None = Field(
        None, description="public numbers by feature or channel to standardise by, in place of clients' sums"
    )
    std: tuple[float, ...] | None = Field(None, description="public deviations, beside mean")
    label_column: str | None = Field(None, description="of a file: the column of labels; default: label")
    client_column: str | None = Field(
        None, description="of a file: the column that says whose a row is; default: client"
    )
    split_column: str | None = Field(None, description="of a file: the column of train and test; default: split")
    classes: tuple[str, ...] | None = Field(
        None, description="of a file or folder: the labels there may be, in their order; default: those found"
    )
    targets: Literal["real", "classes"] | None = Field(
        None, description="of a file: what whole numbers are, real or classes; default: as the loss has it"
    )

    @model_validator(mode="before")
    @classmethod
    def _files_name_their_clients(cls, values: Any) -> Any:
        """Unless told otherwise, rows of a file are dealt as its column `client` says, pictures as their folders do."""
        named = values.get("dataset") if isinstance(values, dict) else None  # a file may say `data = 3`
        return {"partition": "client"} | values if isinstance(named, str) and is_own(named) else values

    def model_post_init(self, _: object) -> None:
        if not self.own and self.dataset not in NAMES and not is_own(self.dataset):
            raise unknown("dataset", self.dataset, (*NAMES, *FORMS))
        if self.partition not in PARTITIONS:
            raise unknown("partition", self.partition, PARTITIONS)
        given = [name for name in ("label_column", "client_column", "split_column", "targets") if getattr(self, name)]
        if given and not is_data_file(self.dataset):
            raise ConfigError(f"{given[0]} is of a file, and {self.dataset} is none")
        if self.classes is not None and not is_own(self.dataset):
            raise ConfigError(f"classes are of a file or folder, and {self.dataset} has its own")

    @property
    def own(self) -> bool:
        """Whether the clients come dealt, from a user's function."""
        return ":" in self.dataset

    def how(self) -> Partition:
        """The partition, given those of these options that it takes."""
        values = self.model_dump() | {"per_client": self.shards_per_client}
        takes = fields(PARTITIONS[self.partition])  # type: ignore[arg-type]  # every partition is a dataclass
        return PARTITIONS[self.partition](**{field.name: values[field.name] for field in takes})


_DRAW = ("clients", "alpha", "shards_per_client", "min_samples")  # settings of random partitions
_PRETRAINED = ("backbone", "head", "trainable", "drop", "pool", "digest")
_HIDDEN = (100,)  # widths of a perceptron's hidden layers, where nothing is said
# A perceptron's first weights by method, where nothing is said: sparse rows lose less where few units are on.
SUITED = {"cp-ntk-fl": {"gain": 0.7, "bias": -1.0}}


class ModelConfig(Options, title="[model]"):
    """Which network: one of `ntkfl.models`, or a user's own as `package.module:factory`, or a head on a backbone."""

    name: str = Field("mlp", description=f"{', '.join(MODELS)}, or package.module:factory")
    backbone: str | None = Field(None, description="package.module:factory of a pretrained network, given the options")
    head: tuple[int, ...] | None = Field(None, description="hidden widths of a backbone's head; default: none, linear")
    trainable: tuple[str, ...] | None = Field(None, description="what trains, as patterns of names; default: head")
    drop: str | None = Field(None, description="the backbone's submodule to leave out, such as its classifier")
    pool: str | None = Field(None, description="positions of the backbone's output: mean (default) or first")
    digest: str | None = Field(
        None, pattern="^[0-9a-f]{64}$", description="64 hexadecimal digits: the sha256 that the backbone must have"
    )
    hidden: tuple[int, ...] | None = Field(None, description="hidden widths of an mlp; default: 100")
    gain: float | None = Field(None, gt=0, description="scale of an mlp's first weights; default: the method's, or 1")
    bias: float | None = Field(None, description="an mlp's first biases; default: the method's, or 0")
    options: dict[str, Any] = Field(default_factory=dict, description="anything else the builder takes")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        return {"name": "backbone", **values} if isinstance(values, dict) and values.get("backbone") else values

    def model_post_init(self, _: object) -> None:
        if (self.name == "backbone") != (self.backbone is not None) or ":" not in (self.backbone or ":"):
            raise ConfigError("a backbone is given as backbone = package.module:factory, and no other model beside it")
        if self.backbone is None and (given := [n for n in _PRETRAINED if getattr(self, n) is not None]):
            raise ConfigError(f"{given[0]} is of a backbone: give one, as backbone = package.module:factory")
        if not self.code and self.name not in MODELS:
            raise unknown("model", self.name, (*MODELS, "package.module:factory"))
        if self.name != "mlp" and any(own is not None for own in (self.hidden, self.gain, self.bias)):
            raise ConfigError(f"hidden, gain and bias are of an mlp: leave them out for {self.name}")

    @property
    def code(self) -> list[str]:
        """The user's code that builds it: one name, or none."""
        return [name for name in (self.backbone or self.name,) if ":" in name]

    def suited(self, method: Method) -> ModelConfig:
        """With what suits the method, and defaults spelled out, where nothing was said."""
        if self.name != "mlp":  # what suits methods are options of a perceptron
            return self
        suits = {"hidden": _HIDDEN, "gain": 1.0, "bias": 0.0, **SUITED.get(method.name, {})}
        return ModelConfig(**{**suits, **self.model_dump(exclude_none=True)})


class RunConfig(Options, title="a run"):
    """One training run."""

    rounds: int = Field(10, ge=1, description="communication rounds")
    clients_per_round: int = Field(20, ge=1, description="clients drawn each round, or all where there are fewer")
    seed: int = Field(0, ge=0, description="root of everything random")
    repeatable: bool = Field(
        True, description="clients' noise follows from the seed; false: from the operating system, as --private has it"
    )
    hold_out: int = Field(0, ge=0, description="clients set aside as a validation set")
    stop_at: float | None = Field(None, gt=0, le=1, description="end once the test accuracy is this")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    method: dict[str, Any] = Field(default_factory=lambda: {"name": DEFAULT_METHOD})
    privacy: Privacy = Privacy()
    robust: Robust | Literal["on"] = Robust()
    byzantine: Byzantine | None = Field(None, description="clients that corrupt what they reply: simulations alone")

    @staticmethod
    def read(path: Path, *, allow_code: bool = False) -> RunConfig:
        """From a TOML file, such as the config.toml of a run. One that names code is refused, unless that is allowed:
        a file that its user wrote for the purpose may, one that came in a folder may not.
        """
        values = read_toml(path)
        named = values.get("model")
        if values.pop("simulation", None) and isinstance(named, dict) and "start" in named:
            raise ConfigError(
                f"{path} is of a run made from Python: its model and data have no names to rebuild them by; there, "
                "ntkfl.Run.load(folder, model) loads it"
            )
        for noted in NOTED:
            values.pop(noted, None)
        with read_from(path):
            config = RunConfig(**values)
        if not allow_code:
            refuse_code(config.code, str(path))
        return config

    def with_cohort(self, clients: int) -> RunConfig:
        """With all `clients` in each round, if they are fewer than the default and no number was given."""
        if "clients_per_round" in self.model_fields_set:
            return self
        there = max(1, clients - self.hold_out)
        return self.model_copy(update={"clients_per_round": min(self.clients_per_round, there)})

    @cached_property
    def built_method(self) -> Method:
        """The method. A user's own class is imported, which whoever asks has allowed."""
        return build_method(self.method)

    @cached_property
    def settled(self) -> tuple[Privacy, Robust]:
        """The settings of privacy and robustness, those of the method where nothing was said, checked against it."""
        return settle(self.built_method, self.privacy, self.robust)

    @property
    def code(self) -> list[str]:
        """Names of a user's own code in it, which building it imports and calls."""
        return [*self.model.code, *method_code(self.method), *([self.data.dataset] if self.data.own else [])]


def method_class(options: Mapping[str, Any]) -> type[Method]:
    """The class of a method by its name."""
    name = options.get("name")
    if is_code(name):
        kind = find_factory(str(name))
        if not (isinstance(kind, type) and issubclass(kind, Method)):
            raise ConfigError(f"{name!r} is no method: a class that derives from ntkfl.methods.Method is needed")
        return kind
    if not isinstance(name, str) or name not in METHODS:
        module, _, kind_name = str(name).rpartition(".")
        near = (f"{module}:{kind_name}",) if module else ()
        raise unknown("method", name, (*METHODS, *near, "package.module:Class"))
    return METHODS[name]


def build_method(options: Mapping[str, Any]) -> Method:
    """A method from its name and options; a user's own class is imported, which whoever calls this has allowed."""
    kind = method_class(options)
    sections = {"privacy": Privacy.model_fields, "robust": Robust.model_fields}
    for name in sorted(options.keys() - kind.model_fields.keys()):
        for section, settings in sections.items():
            if name in settings:
                raise ConfigError(f"{name} is a setting of [{section}], not an option of {kind.name}")
    try:
        return kind(**{k: v for k, v in options.items() if k != "name"})
    except TypeError as error:  # a class that lacks a part of a method
        raise ConfigError(f"{options.get('name')} is no whole method: {error}; it needs round and answer") from None


def describe_method(method: Method) -> dict[str, Any]:
    """Name and options, from which `build_method` makes it again; in types that JSON has."""
    return {"name": method.name} | written(method)


def describe_settings(privacy: Privacy, robust: Robust) -> dict[str, Any]:
    """The sections `[privacy]` and `[robust]` in types that TOML has, with every setting."""
    sections = {"privacy": privacy.model_dump(mode="json"), "robust": robust.model_dump(mode="json")}
    return {
        section: {name: NONE if value is None else value for name, value in values.items()}
        for section, values in sections.items()
    }


def method_code(options: Mapping[str, Any]) -> list[str]:
    """Names of a user's own code in a method's options: the method itself, its loss."""
    return [name for name in (options.get("name"), options.get("loss")) if is_code(name)]


def build_model(config: RunConfig, data: Federated) -> nn.Module:
    """The network for these clients, with its first weights."""
    shape = config.settled[0].model_input_shape(data.input_shape)
    return build_network(config.model.suited(config.built_method), shape, data.output_dim, config.seed)


def build_network(config: ModelConfig, input_shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """The network with weights drawn from `seed`, leaving the global generator as it was.

    A factory is called with the shape of one input, the number of outputs, and the options; a backbone's with the
    options alone.
    """
    own = {"hidden": config.hidden, "gain": config.gain, "bias": config.bias} if config.name == "mlp" else {}
    options = {name: value for name, value in own.items() if value is not None} | config.options
    builder = MODELS.get(config.name) or find_factory(config.backbone or config.name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "model"))
        try:
            if config.backbone is None:
                model = builder(tuple(input_shape), outputs, **options)
            else:
                model = _with_head(config, builder(**options), tuple(input_shape), outputs)
        except (TypeError, ValueError, OverflowError, MemoryError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"model {config.name!r} cannot be built of (input shape, outputs, **options): {reason}"
            ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {config.name!r} must give an nn.Module, not {type(model).__name__}")
    return model


def _with_head(config: ModelConfig, backbone: object, inputs: tuple[int, ...], outputs: int) -> nn.Module:
    """A head on the backbone that its factory gave."""
    if not isinstance(backbone, nn.Module):
        raise ConfigError(f"backbone {config.backbone!r} must give an nn.Module, not {type(backbone).__name__}")
    if config.digest is not None and (found := digest(backbone)) != config.digest:
        raise ConfigError(
            f"the backbone's weights differ from the agreed ones: {found[:12]}…, not {config.digest[:12]}…"
        )
    given = {name: getattr(config, name) for name in ("trainable", "drop", "pool")}
    given = {name: value for name, value in given.items() if value is not None}
    return head(backbone, outputs, inputs=inputs, hidden=config.head or (), **given)


def load_data(config: RunConfig) -> Federated:
    """The clients, standardised where the settings say so. The partition follows the run's seed, so that seeds repeat
    the whole experiment.

    A method with a `shared_fraction` (data-share) gets its global set out of the training rows before they are dealt,
    so that all methods see the same number of samples in all.
    """
    fraction = float(getattr(config.built_method, "shared_fraction", 0.0))
    if fraction > 0 and (config.data.own or is_own(config.data.dataset)):
        raise ConfigError("a shared set is taken out of a dataset with a name; a user's own clients come dealt")
    if config.data.own:
        data = find_factory(config.data.dataset)()
        if not isinstance(data, Federated):
            raise ConfigError(
                f"{config.data.dataset!r} must give clients (ntkfl.data.from_clients), not {type(data).__name__}"
            )
    else:
        dataset, shared = open_dataset(config.data.dataset, **_of_file(config)), None
        if fraction > 0:  # of what clients hold, so of all rows it is fraction / (1 + fraction)
            dataset, *taken = dataset.without(fraction / (1 + fraction), seed=config.seed)
            shared = (taken[0], taken[1])
        data = dataset.partition(config.data.how(), seed=config.seed)
        data = replace(data, shared=shared)
    public = config.data.mean, config.data.std
    return data.standardized(*public) if config.data.standardize or any(public) else data


def _of_file(config: RunConfig) -> dict[str, Any]:
    """How a file or folder is read. Where nobody says what numbers are, squared error makes them real targets."""
    own, data = dict[str, Any](classes=config.data.classes), config.data
    if is_data_file(data.dataset):
        numbers = {"mse": "numbers", "ce": None}.get(loss_name(config.built_method.loss), "unknown")
        own |= {"label": data.label_column, "client": data.client_column, "split": data.split_column}
        own |= {"targets": data.targets or numbers}
    return own


def spelled_out(config: RunConfig) -> dict[str, Any]:
    """What config.toml holds: every setting, defaults included, but those of a random partition where the data name
    their clients: they say nothing then.
    """
    method = config.built_method
    values = config.model_dump(mode="json", exclude={"method", "model", "byzantine", "privacy", "robust"})
    drawn = () if config.data.partition != ByClient.kind else _DRAW
    values["data"] = {n: value for n, value in values["data"].items() if value is not None and n not in drawn}
    if config.data.own:  # the rest says how others are dealt
        values["data"] = {n: v for n, v in values["data"].items() if n in ("dataset", "standardize", "mean", "std")}
    return {
        "ntkfl": __version__,
        "simulation": True,
        **values,
        **({} if config.byzantine is None else {"byzantine": config.byzantine.model_dump(mode="json")}),
        "model": config.model.suited(method).model_dump(mode="json"),
        "method": describe_method(method),
        **describe_settings(*config.settled),
    }
