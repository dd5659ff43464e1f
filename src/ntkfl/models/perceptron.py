"""The paper's network."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from ntkfl.errors import ConfigError


def mlp(*sizes: int, gain: float = 1.0, bias: float = 0.0) -> nn.Sequential:
    """A multilayer perceptron with ReLU between layers: `mlp(784, 100, 10)` is the paper's network.

    Kaiming initialisation (normal, fan-in) with zero biases. Inputs of any shape are flattened first. The first layer's
    weights are multiplied by `gain`, and its biases begin at `bias`.
    """
    if len(sizes) < 2 or any(not isinstance(n, int) or n < 1 for n in sizes):
        raise ConfigError(f"a perceptron needs at least an input and an output size, all positive; got {list(sizes)}")
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        linear = nn.Linear(n_in, n_out)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        if i == 0:
            with torch.no_grad():
                linear.weight.mul_(gain)
                linear.bias.fill_(bias)
        layers += [linear] if i == len(sizes) - 2 else [linear, nn.ReLU()]
    return nn.Sequential(*layers)
