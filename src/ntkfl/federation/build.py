"""From a configuration to what it names: the data, the network, the method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ntkfl.data import Federated
from ntkfl.data.files import is_data_file
from ntkfl.data.sources import is_own, open_dataset
from ntkfl.errors import ConfigError
from ntkfl.federation.config import ModelConfig, RunConfig, describe_method, describe_settings
from ntkfl.federation.seeds import derive
from ntkfl.models import MODELS, digest, head
from ntkfl.tangent.losses import loss_name
from ntkfl.user_code import find_factory
from ntkfl.version import __version__


def build_model(config: RunConfig, data: Federated) -> nn.Module:
    """The network for these clients, with its first weights."""
    shape = config.settled[0].model_input_shape(data.input_shape)
    model = build_network(config.model.suited(config.built_method), shape, data.output_dim, config.seed)
    return model.to(getattr(torch, config.precision))


def build_network(config: ModelConfig, input_shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """The network with weights drawn from `seed`, leaving the global generator as it was.

    A factory is called with the shape of one input, the number of outputs, and the options; a backbone's with the
    options alone.
    """
    own = {"hidden": config.hidden, "gain": config.gain, "bias": config.bias} if config.name == "mlp" else {}
    options = {name: value for name, value in own.items() if value is not None} | config.options
    if config.backbone is not None:
        builder: Callable[..., Any] = partial(_adapted, config, find_factory(config.backbone))
    else:
        builder = MODELS.get(config.name) or find_factory(config.name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "model"))
        try:
            model = builder(tuple(input_shape), outputs, **options)
        except (TypeError, ValueError, OverflowError, MemoryError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"model {config.name!r} cannot be built: {reason}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {config.name!r} must give an nn.Module, not {type(model).__name__}")
    return model


def _adapted(
    config: ModelConfig, factory: Callable[..., Any], inputs: tuple[int, ...], outputs: int, **options: Any
) -> nn.Module:
    """A head on what the factory gives for the options."""
    backbone = factory(**options)
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
    return data.standardized() if config.data.standardize else data


def _of_file(config: RunConfig) -> dict[str, Any]:
    """How a file or folder is read. Where nobody says what numbers are, squared error makes them real targets."""
    own, data = dict[str, Any](classes=config.data.classes), config.data
    if is_data_file(data.dataset):
        numbers = {"mse": "numbers", "ce": None}.get(loss_name(config.built_method.loss), "unknown")
        own |= {"label": data.label_column, "client": data.client_column, "split": data.split_column}
        own |= {"targets": data.targets or numbers}
    return own


def spelled_out(config: RunConfig) -> dict[str, Any]:
    """What config.toml holds: every setting, defaults included."""
    method = config.built_method
    values = config.model_dump(mode="json", exclude={"method", "model", "byzantine", "privacy", "robust"})
    values["data"] = {name: value for name, value in values["data"].items() if value is not None}
    if config.data.own:  # the rest says how others are dealt
        values["data"] = {"dataset": config.data.dataset, "standardize": config.data.standardize}
    return {
        "ntkfl": __version__,
        "simulation": True,
        **values,
        **({} if config.byzantine is None else {"byzantine": config.byzantine.model_dump(mode="json")}),
        "model": config.model.suited(method).model_dump(mode="json"),
        "method": describe_method(method),
        **describe_settings(*config.settled),
    }
