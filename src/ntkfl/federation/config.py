"""A run as people write it down: names and numbers in TOML, from which data, model and method are built."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import AliasChoices, Field
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ntkfl.data import NAMES, Federated, load
from ntkfl.data.partition import Partition
from ntkfl.data.partitions import PARTITIONS, make
from ntkfl.errors import ConfigError, TrustError, unknown
from ntkfl.federation.byzantine import Byzantine
from ntkfl.federation.memory_check import available_bytes
from ntkfl.federation.run import Run
from ntkfl.federation.run_folder import Record
from ntkfl.federation.seeds import derive
from ntkfl.federation.simulation import train
from ntkfl.federation.transcript import Transcript
from ntkfl.federation.transport import Carrier
from ntkfl.methods import METHODS, Method
from ntkfl.models import MODELS
from ntkfl.options import Options
from ntkfl.safe_parse import read_toml
from ntkfl.version import __version__


class DataConfig(Options):
    """Which data, and how they are dealt to clients."""

    dataset: str = Field("fashion-mnist", description="a name, or package.module:function that gives the clients")
    partition: str = Field("dirichlet", description="dirichlet, writer, iid or shards")
    clients: int = Field(300, ge=1)
    alpha: float = Field(0.1, gt=0, description="Dirichlet concentration: smaller is more heterogeneous")
    reading: Literal["composition", "shares"] = Field("composition", description="of the Dirichlet draw")
    overlap: bool = Field(False, description="clients draw anew from all images, as the authors' files do")
    shards_per_client: int = Field(2, ge=1)
    min_samples: int = Field(16, ge=1, description="writers with fewer training samples are left out")

    def model_post_init(self, _: object) -> None:
        if not self.own and self.dataset not in NAMES:
            raise unknown("dataset", self.dataset, (*NAMES, "package.module:function"))
        if self.partition not in PARTITIONS:
            raise unknown("partition", self.partition, PARTITIONS)

    @property
    def own(self) -> bool:
        """Whether the clients come dealt, from a user's function."""
        return ":" in self.dataset

    def how(self) -> Partition:
        """The partition, given those of these options that it takes."""
        values = self.model_dump() | {"per_client": self.shards_per_client}
        takes = fields(PARTITIONS[self.partition])  # type: ignore[arg-type]  # every partition is a dataclass
        return make(self.partition, {field.name: values[field.name] for field in takes})


class ModelConfig(Options):
    """Which network: one of `ntkfl.models`, or a user's own as `package.module:factory`."""

    name: str = Field("mlp", description="mlp, cnn, resnet, gru, transformer, or package.module:factory")
    hidden: tuple[int, ...] | None = Field(None, description="hidden widths of an mlp; default: 100")
    gain: float | None = Field(None, gt=0, description="of an mlp's first weights; default: the method's, or 1")
    bias: float | None = Field(None, description="an mlp's first biases; default: the method's, or 0")
    options: dict[str, Any] = Field(default_factory=dict, description="anything else the builder takes")

    def model_post_init(self, _: object) -> None:
        if not self.own and self.name not in MODELS:
            raise unknown("model", self.name, (*MODELS, "package.module:factory"))
        if self.name != "mlp" and any(own is not None for own in (self.hidden, self.gain, self.bias)):
            raise ConfigError(f"hidden, gain and bias are of an mlp; give {self.name} its own as options")

    def build(self, input_shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
        """The network with weights drawn from `seed`, leaving the global generator as it was.

        A factory is called with the shape of one input, the number of outputs, and the options.
        """
        own = {"hidden": self.hidden, "gain": self.gain, "bias": self.bias} if self.name == "mlp" else {}
        options = {name: value for name, value in own.items() if value is not None} | self.options
        builder = MODELS.get(self.name) or find_factory(self.name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "model"))
            try:
                if self.name in MODELS:  # its weights are counted before there are any
                    with torch.device("meta"), _Undrawn():
                        _check_room(self.name, builder(tuple(input_shape), outputs, **options))
                    torch.manual_seed(derive(seed, "model"))
                model = builder(tuple(input_shape), outputs, **options)
            except (TypeError, ValueError, OverflowError, MemoryError, RuntimeError) as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise ConfigError(f"model {self.name!r} cannot be built: {reason}") from error
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model {self.name!r} must give an nn.Module, not {type(model).__name__}")
        return model

    @property
    def own(self) -> bool:
        """Whether a user's code builds it."""
        return ":" in self.name

    def suited(self, method: Method) -> ModelConfig:
        """With what suits the method, and defaults spelled out, where nothing was said."""
        if self.name != "mlp":
            return self
        given = self.model_dump(exclude_none=True)
        return ModelConfig(**{"hidden": (100,), "gain": 1.0, "bias": 0.0, **method.model_defaults, **given})


class _Undrawn(TorchFunctionMode):
    """Weights that are only counted are not drawn: on no device that would import torch's compiler, for seconds."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.normal_ else func(*args, **(kwargs or {}))


def _check_room(name: str, model: nn.Module) -> None:
    """`ConfigError` where a model's weights alone are more than there is room for."""
    needed = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    room = available_bytes(torch.device("cpu"))
    if room is not None and needed > room:
        raise ConfigError(
            f"model {name!r} has weights of {needed / 2**30:,.1f} GiB, and {room / 2**30:.1f} GiB are free"
        )


def find_factory(name: str) -> Callable[..., Any]:
    """A user's `package.module:factory`; the working directory counts as a place to find packages."""
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError) as error:  # the latter of names such as ':x' and '.x:y'
        raise ConfigError(f"cannot import {module_name!r} for {name!r}: {error}") from None
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{module_name!r} has no function {attribute!r}")
    return found  # type: ignore[no-any-return]  # whatever it is, it can be called


def refuse_code(named: Sequence[str], source: str) -> None:
    """`TrustError` if `source`, a file that may be somebody else's, names code: building from it would run that."""
    if named:
        raise TrustError(
            f"{source} names code that would be imported and run here: {', '.join(named)}; "
            "if you trust whoever wrote it, allow it with --allow-code (in Python: allow_code=True)"
        )


class RunConfig(Options):
    """One training run."""

    rounds: int = Field(10, ge=1)
    clients_per_round: int = Field(20, ge=1)
    seed: int = Field(0, ge=0)
    hold_out: int = Field(0, ge=0, description="clients set aside as the server's validation set")
    stop_at: float | None = Field(None, gt=0, le=1, description="end once the test accuracy is this")
    precision: str = Field("float32", pattern="^float(32|64)$")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    method: dict[str, Any] = Field(default_factory=lambda: {"name": "ntk-fl"})
    byzantine: Byzantine | None = Field(
        None,
        validation_alias=AliasChoices("byzantine", "poison"),  # its first name
        description="clients that corrupt what they reply: simulations alone",
    )

    @staticmethod
    def read(path: Path, *, allow_code: bool = False) -> RunConfig:
        """From a TOML file, such as the config.toml of a run. One that names code is refused, unless that is allowed:
        a file that its user wrote for the purpose may, one that came in a folder may not.
        """
        values = read_toml(path)
        named = values.get("model")
        if values.pop("simulation", None) and isinstance(named, dict) and "start" in named:
            raise ConfigError(
                f"{path} is of a run made from Python: its model and data have no names to rebuild them by"
            )
        for noted in ("ntkfl", "shape", "runtime"):
            values.pop(noted, None)
        config = RunConfig(**values)
        if not allow_code:
            refuse_code(config.code, str(path))
        return config

    @property
    def code(self) -> list[str]:
        """Names of a user's own code in it, which `prepare` and `build_model` import and call."""
        model, data = self.model, self.data
        named = [name for name, own in ((model.name, model.own), (data.dataset, data.own)) if own]
        return named + own_method(self.method)

    def build_method(self) -> Method:
        return build_method(self.method)

    def dump(self) -> dict[str, Any]:
        """What config.toml holds: every setting, defaults included."""
        method = self.build_method()
        values = self.model_dump(mode="json", exclude={"method", "model", "byzantine"})
        if self.data.own:  # the rest says how others are dealt
            values["data"] = {"dataset": self.data.dataset}
        return {
            "ntkfl": __version__,
            "simulation": True,
            **values,
            **({} if self.byzantine is None else {"byzantine": self.byzantine.model_dump(mode="json")}),
            "model": self.model.suited(method).model_dump(mode="json"),
            "method": describe_method(method),
        }


def own_method(options: Mapping[str, Any]) -> list[str]:
    """The name of a user's own method, `package.module:Class`, where these options are of one: code that is run."""
    name = options.get("name")
    return [name] if isinstance(name, str) and ":" in name else []


def build_method(options: Mapping[str, Any]) -> Method:
    """A method from its name and options; a user's own class is imported, which whoever calls this has allowed."""
    name = options.get("name")
    if own_method(options):
        kind = find_factory(str(name))
        if not (isinstance(kind, type) and issubclass(kind, Method)):
            raise ConfigError(f"{name!r} is no method: a class that derives from ntkfl.methods.Method is needed")
    elif not isinstance(name, str) or name not in METHODS:
        raise unknown("method", name, (*METHODS, "package.module:Class"))
    else:
        kind = METHODS[name]
    try:
        return kind(**{k: v for k, v in options.items() if k != "name"})
    except TypeError as error:  # a class that lacks a part of a method
        raise ConfigError(f"method {name!r} cannot be made: {error}") from None


def describe_method(method: Method) -> dict[str, Any]:
    """Name and options, from which `build_method` makes it again; in types that JSON has."""
    return {"name": method.name} | method.model_dump(mode="json")


@dataclass(frozen=True)
class Prepared:
    """What a configuration names, loaded: the clients, and data shared by the server where the method has some."""

    fed: Federated
    shared: tuple[Tensor, Tensor] | None


def prepare(config: RunConfig) -> Prepared:
    """Load and partition the data. The partition follows the run's seed, so that seeds repeat the whole experiment.

    A method with a `shared_fraction` gets its global set out of the training rows before they are dealt, so that all
    methods see the same number of samples in all.
    """
    fraction = float(getattr(config.build_method(), "shared_fraction", 0.0))
    if config.data.own:
        return Prepared(_own_clients(config.data.dataset, fraction), None)
    dataset = load(config.data.dataset)
    shared = None
    if fraction > 0:
        # The fraction is of what clients hold, so of all rows it is fraction / (1 + fraction).
        dataset, *taken = dataset.without(fraction / (1 + fraction), seed=config.seed)
        shared = (taken[0], taken[1])
    return Prepared(dataset.partition(config.data.how(), seed=config.seed), shared)


def _own_clients(name: str, shared_fraction: float) -> Federated:
    fed = find_factory(name)()
    if not isinstance(fed, Federated):
        raise ConfigError(f"{name!r} must give clients (ntkfl.data.from_clients), not {type(fed).__name__}")
    if shared_fraction > 0:
        raise ConfigError("a shared_fraction is taken out before clients are dealt theirs, and these come dealt")
    return fed


def execute(
    config: RunConfig,
    *,
    prepared: Prepared | None = None,
    out: Path | None = None,
    resume: bool = False,
    device: str | None = None,
    record_wire: Collection[int] = (),
    on_wire: Callable[[Transcript], None] | None = None,
    on_start: Callable[[str], None] | None = None,
    on_round: Callable[[Record, Record], None] | None = None,
    carrier: Carrier | None = None,
    runtime: str | None = None,
) -> Run:
    """Train what the configuration says; with a `carrier`, the `runtime` it belongs to is written down with it."""
    ready = prepared or prepare(config)
    return train(
        build_model(config, ready.fed),
        ready.fed,
        config.build_method(),
        rounds=config.rounds,
        clients_per_round=config.clients_per_round,
        seed=config.seed,
        hold_out=config.hold_out,
        shared=ready.shared,
        stop_at=config.stop_at,
        out=out,
        resume=resume,
        device=device,
        config=config.dump() | ({} if runtime is None else {"runtime": runtime}),
        record_wire=record_wire,
        on_wire=on_wire,
        on_start=on_start,
        on_round=on_round,
        progress=False,
        carrier=carrier,
        byzantine=config.byzantine,
    )


def build_model(config: RunConfig, fed: Federated) -> nn.Module:
    """The network for these clients, with its first weights."""
    method = config.build_method()
    shape = method.model_input_shape(fed.input_shape)
    model = config.model.suited(method).build(shape, fed.output_dim, config.seed)
    return model.to(getattr(torch, config.precision))
