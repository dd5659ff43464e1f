"""The linear layer that gives a network's outputs: where its weights lie, and its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ntkfl.errors import ModelError
from ntkfl.tangent.parameters import column_slices, evaluating, trainable

_ROWS = 4096  # samples whose features are held at once


class LastLayer(NamedTuple):
    """The linear layer that gives a network's outputs, and where its weights lie in the flat vector."""

    module: nn.Linear
    weight: slice
    bias: slice

    def write(self, flat: Tensor, weights: Tensor) -> Tensor:
        """`flat` with the layer's weights (W; bᵀ) [p, d2]."""
        out = flat.clone()
        out[self.weight], out[self.bias] = weights[:-1].mT.reshape(-1).to(flat), weights[-1].to(flat)
        return out


def last_layer(model: nn.Module, outputs: int) -> LastLayer:
    """The last linear layer with `outputs` outputs, which must train with its bias."""
    parameters = trainable(model)
    names, slices = {id(p): name for name, p in parameters.items()}, column_slices(parameters)
    for module in reversed([m for m in model.modules() if isinstance(m, nn.Linear)]):
        if module.out_features == outputs and id(module.weight) in names and id(module.bias) in names:
            return LastLayer(module, slices[names[id(module.weight)]], slices[names[id(module.bias)]])
    raise ModelError("a last linear layer that trains, with a bias, is needed: this network has none")


def trains_alone(model: nn.Module, outputs: int) -> bool:
    """Whether nothing trains but one linear layer with `outputs` outputs."""
    own = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == outputs]
    trained = {id(p) for p in trainable(model).values()}
    return any(trained <= {id(p) for p in module.parameters()} for module in own)


@torch.no_grad()
def head_inputs(model: nn.Module, outputs: int, x: Tensor, most: int = _ROWS) -> Iterator[tuple[slice, Tensor]]:
    """Inputs of the last layer for the rows of x, `most` rows at a time: (which rows, [n, F]). One forward pass."""
    layer, seen = last_layer(model, outputs), list[tuple[Tensor, Tensor]]()
    hook = layer.module.register_forward_hook(lambda _, given, out: seen.append((given[0], out)))
    try:
        for at in range(0, len(x), most):
            with evaluating(model):
                out = model(x[at : at + most])
            # A sample that is not finite must not show by an error.
            same = len(seen) == 1 and torch.allclose(seen[0][1], out, rtol=0, atol=0, equal_nan=True)
            if not same or seen[0][0].ndim != 2:
                raise ModelError("a network whose outputs are its last linear layer's is needed, and this one is not")
            yield slice(at, at + most), seen.pop()[0]
    finally:
        hook.remove()
