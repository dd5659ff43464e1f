"""A pretrained network as a frozen backbone, and a head that trains.

Any `nn.Module` will do, so those of torchvision, timm and transformers do; none of them is imported here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ntkfl.errors import ConfigError, ModelError
from ntkfl.models.networks import mlp
from ntkfl.tangent.parameters import evaluating


class Backbone(nn.Module):
    """x → features [N, features]: a network's output, pooled over positions."""

    def __init__(self, network: nn.Module, pool: str = "mean") -> None:
        super().__init__()
        if pool not in ("mean", "first"):
            raise ConfigError(f"unknown pool {pool!r}: valid are mean, first")
        self.network, self.pool = network, pool

    def forward(self, x: Tensor) -> Tensor:
        return _pooled(_tensor(self.network(x)), self.pool)


class Adapted(nn.Module):
    """`head(backbone(x))`. The backbone stays in eval mode: its dropout is off, its running statistics are kept."""

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        for module in backbone.modules():
            if isinstance(module, _BatchNorm):
                module.statistics_stay = True  # type: ignore[assignment]  # so that methods do not send them
        self.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(x))
        return out

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        self.backbone.eval()
        return self

    @property
    def frozen(self) -> bool:
        """Whether nothing in the backbone trains: then a sample's features never change."""
        return not any(p.requires_grad for p in self.backbone.parameters())


def head(
    backbone: nn.Module,
    outputs: int,
    *,
    features: int | None = None,
    inputs: Sequence[int] | None = None,
    hidden: Sequence[int] = (),
    trainable: Sequence[str] = ("head",),
    drop: str | None = None,
    pool: str = "mean",
) -> Adapted:
    """A network that trains a new head on `backbone`, which is frozen in place.

    The head is linear and begins at zero, or with `hidden` widths a perceptron. Its inputs are counted by a pass over
    zeros of the shape `inputs`, or given as `features`. `drop` replaces the named submodule, such as a classifier
    "fc", by the identity. Outputs with positions ([N, C, H, W] or [N, T, features], also as `last_hidden_state`) are
    pooled: their mean, or the first (a class token). `trainable`: see `freeze`.
    """
    if drop is not None:
        if drop not in (names := [name for name, _ in backbone.named_modules() if name]):
            raise ModelError(f"the backbone has no submodule {drop!r}; the last are {', '.join(names[-5:])}")
        backbone.set_submodule(drop, nn.Identity())
    front = Backbone(backbone, pool).eval()
    like = next(iter(backbone.parameters()), torch.empty(0))
    if features is None:
        if inputs is None:
            raise ConfigError("head needs to know its inputs: give features=1280, or inputs=(3, 224, 224)")
        features = outputs_of(front, like.new_zeros(1, *inputs))
    new = mlp(features, *hidden, outputs) if hidden else nn.Linear(features, outputs)
    if not hidden:
        for parameter in new.parameters():
            nn.init.zeros_(parameter)
    model = Adapted(front, new.to(like.device, like.dtype))
    freeze(model, trainable)
    return model


def freeze(model: nn.Module, trainable: Sequence[str]) -> None:
    """Train what the patterns name and nothing else. In place.

    A pattern is the name of a parameter or of a submodule, with * and ? as in file names; names inside a backbone have
    no prefix: ["head", "layer4.*"].
    """
    parameters = {name.removeprefix("backbone.network."): p for name, p in model.named_parameters()}
    model.requires_grad_(False)
    for pattern in trainable:
        named = [name for name in parameters if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
        if not named:
            raise ModelError(f"no weight is called {pattern!r}; the last are {', '.join([*parameters][-6:])}")
        for name in named:
            parameters[name].requires_grad_(True)


def digest(model: nn.Module) -> str:
    """sha256 (hex) of a model's weights and buffers, their names and types."""
    return digest_of(sorted(model.state_dict().items()))


def digest_of(tensors: Iterable[tuple[str, Tensor]], start: str = "") -> str:
    """sha256 (hex) of `start` and of tensors, their names and types."""
    found = hashlib.sha256(start.encode())
    for name, value in tensors:
        found.update(f"{name} {value.dtype} {list(value.shape)};".encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


@torch.no_grad()
def outputs_of(model: nn.Module, x: Tensor) -> int:
    """The number of outputs for samples x [n, …]; `ModelError` where the model does not take them."""
    try:
        with evaluating(model):
            f = model(x)
    except Exception as error:  # whatever a user's model raises
        reason = str(error).split("\n")[0]
        raise ModelError(f"the model fails on inputs of shape {list(x.shape[1:])}: {reason}") from error
    if not isinstance(f, Tensor) or f.ndim != 2 or len(f) != len(x):
        given = list(f.shape) if isinstance(f, Tensor) else f"a {type(f).__name__}"
        raise ModelError(f"the model must give a tensor with one row of outputs a sample, not {given}")
    return f.shape[1]


def _tensor(out: Any) -> Tensor:
    """A network's output as a tensor: itself, its `last_hidden_state`, or the first of several."""
    if isinstance(out, Tensor):
        return out
    found = out.get("last_hidden_state") if isinstance(out, Mapping) else getattr(out, "last_hidden_state", None)
    if found is None and isinstance(out, tuple | list) and out:
        found = out[0]
    if not isinstance(found, Tensor):
        raise ModelError(f"the backbone gives a {type(out).__name__}, not a tensor or one with a last_hidden_state")
    return found


def _pooled(out: Tensor, pool: str) -> Tensor:
    """[N, F] as it is, [N, C, H, W] → [N, C], [N, T, F] → [N, F]."""
    if out.ndim < 2:
        raise ModelError(f"the backbone gives {list(out.shape)}: a row per sample is needed")
    if out.ndim == 2:
        return out
    if out.ndim == 3:
        return out[:, 0] if pool == "first" else out.mean(1)
    if pool == "first":
        raise ConfigError("pool 'first' takes a sequence's first token, and this backbone gives images")
    return out.flatten(2).mean(2)
