"""A network that can be replaced by its linearisation: what TCT trains (Yu et al. 2022).

The linear model θᵀφ(x) has as features φ the derivatives of one output with respect to the weights, at the weights the
network has, with a last layer drawn anew, and a random part of them where there are more than wanted: the authors' form
of the empirical tangent kernel, the same for every class.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from ntkfl.errors import ConfigError, ModelError
from ntkfl.tangent.parameters import call_with, column_slices, evaluating, trainable

_NUMBERS = 2**24  # derivatives held at once


class Convexified(nn.Module):
    """f(x) = network(x) as long as θ [p, d2] is zero, as it is at first; θᵀφ(x) from then on.

    φ(x) = ∂g(x)/∂w at p coordinates of w, where g is the network's first output with its last layer's weights replaced
    by uniform ones within ±1/√h. Coordinates and replacement follow from `seed` alone, so that all parties have the
    same.
    """

    def __init__(self, network: nn.Module, outputs: int, features: int = 100_000, seed: int = 0) -> None:
        super().__init__()
        if features < 1:
            raise ConfigError(f"a linearisation needs at least one feature, got {features}")
        parameters = trainable(network)
        self._columns, self._last = column_slices(parameters), _last_layer(network, outputs, set(parameters))
        weight = parameters[f"{self._last}.weight"]
        draws = torch.Generator().manual_seed(seed)
        h = weight.shape[1]
        readout = (2 * torch.rand(h, generator=draws, device="cpu") - 1) / math.sqrt(h)
        moves = torch.ones(sum(p.numel() for p in parameters.values()), dtype=torch.bool, device="cpu")
        for name in (f"{self._last}.weight", f"{self._last}.bias"):
            if name in parameters:  # other outputs' weights do not move the first
                span = self._columns[name]
                moves[span.start + parameters[name].numel() // outputs : span.stop] = False
        candidates = moves.nonzero().squeeze(1)
        chosen = torch.randperm(len(candidates), generator=draws, device="cpu")[:features].sort().values
        self.network = network
        self.theta = nn.Parameter(torch.zeros(len(chosen), outputs, dtype=weight.dtype))
        self.register_buffer("coordinates", candidates[chosen])
        self.register_buffer("readout", readout.to(weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        if not bool(self.theta.any()):
            out: Tensor = self.network(x)
            return out
        rows = max(1, _NUMBERS // sum(span.stop - span.start for span in self._columns.values()))
        return torch.cat([self.features(part) @ self.theta for part in torch.split(x, rows)])

    def features(self, x: Tensor) -> Tensor:
        """φ of the rows of x: [N, p]."""
        own = dict(self.network.named_parameters())
        point = {name: own[name].detach() for name in self._columns}
        last = torch.zeros_like(point[f"{self._last}.weight"])
        last[0] = self.readout  # type: ignore[assignment]  # a buffer is a tensor
        point[f"{self._last}.weight"] = last

        def first_output(at: dict[str, Tensor], one: Tensor) -> Tensor:
            return call_with(self.network, at, one.unsqueeze(0))[0, 0]

        with evaluating(self.network):
            slopes = vmap(grad(first_output), in_dims=(None, 0))(point, x)
        flat = torch.cat([slopes[name].flatten(1) for name in self._columns], dim=1)
        return flat[:, self.coordinates]  # type: ignore[index]


def convexified(network: nn.Module, outputs: int, features: int = 100_000, seed: int = 0) -> Convexified:
    """`network` with its linearisation beside it, of at most so many features: for `ntkfl.methods.TCT`."""
    return Convexified(network, outputs, features, seed)


def _last_layer(network: nn.Module, outputs: int, names: set[str]) -> str:
    """The name of the last linear layer with so many outputs whose weights train."""
    layers = [n for n, m in network.named_modules() if isinstance(m, nn.Linear) and m.out_features == outputs]
    found: list[str] = [name for name in layers if f"{name}.weight" in names]
    if not found:
        raise ModelError("a convexified network needs a last linear layer that trains, and this one has none")
    return found[-1]
