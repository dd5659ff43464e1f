"""Low-rank adapters (LoRA, Hu et al. 2021): W x + (α/r) B A x with the pretrained W frozen, B zero at first.

A and B are plain linear layers, so that every method, and the factored form of a Jacobian, sees two small ones more.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from ntkfl.errors import ConfigError, ModelError

_DOWN, _UP = "lora_down", "lora_up"
# Their fused kernels read `weight` and pass by what a layer is called with.
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class LoRALinear(nn.Module):
    """y = base(x) + scale · lora_up(lora_down(x)), x [..., n_in] → y [..., n_out]."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        place = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_down = nn.Linear(base.in_features, rank, bias=False, **place)
        self.lora_up = nn.Linear(rank, base.out_features, bias=False, **place)
        nn.init.zeros_(self.lora_up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.scale * self.lora_up(self.lora_down(x))
        return out

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """One layer that does the same: W + scale · B A."""
        layer = copy.deepcopy(self.base)
        layer.weight += self.scale * (self.lora_up.weight @ self.lora_down.weight)
        return layer


def is_adapter(parameter: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return not {_DOWN, _UP}.isdisjoint(parameter.split("."))


def lora(model: nn.Module, rank: int, where: Sequence[str] = ("*",), alpha: float | None = None) -> nn.Module:
    """Give the linear layers that the patterns name an adapter of this rank, and freeze all else. In place.

    What the model computes stays as it is until adapters train. `where` are names with * and ?, as
    ["*.query", "*.value"]; α is the rank by default, so that the scale α/r is 1.
    """
    if rank < 1:
        raise ConfigError(f"an adapter's rank is at least 1, got {rank}")
    fused = {id(inner) for outer in model.modules() if isinstance(outer, _FUSED) for inner in outer.modules()}
    linear = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and id(m) not in fused}
    chosen = [name for name in linear if any(fnmatchcase(name, pattern) for pattern in where)]
    if not chosen:
        named = ", ".join(list(linear)[-5:]) or "none"
        raise ModelError(f"no linear layer is called {' or '.join(where)}: those that can be adapted end with {named}")
    for p in model.parameters():
        p.requires_grad_(False)
    adapters = {name: LoRALinear(linear[name], rank, (rank if alpha is None else alpha) / rank) for name in chosen}
    if "" in adapters:  # the model is a linear layer itself
        return adapters[""]
    for name, adapter in adapters.items():
        model.set_submodule(name, adapter)
    return model


def merge(model: nn.Module) -> nn.Module:
    """A copy without adapters that computes the same: each is added to the layer it adapts."""
    result = copy.deepcopy(model)
    for name, adapter in [(name, m) for name, m in result.named_modules() if isinstance(m, LoRALinear)]:
        if not name:  # the model is an adapted layer itself
            return adapter.merged()
        result.set_submodule(name, adapter.merged())
    return result
