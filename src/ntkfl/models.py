"""Builders for the networks of the paper and a little beyond; any `nn.Module` that maps a batch to [N, d2] will do."""

from __future__ import annotations

import itertools

from torch import nn

from ntkfl.errors import ConfigError


def mlp(*sizes: int) -> nn.Sequential:
    """A multilayer perceptron with ReLU between layers: `mlp(784, 100, 10)` is the paper's network.

    Kaiming initialisation (normal, fan-in) with zero biases. Inputs of any shape are flattened first.
    """
    if len(sizes) < 2 or any(not isinstance(n, int) or n < 1 for n in sizes):
        raise ConfigError(f"a perceptron needs at least an input and an output size, all positive; got {list(sizes)}")
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        linear = nn.Linear(n_in, n_out)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        layers += [linear] if i == len(sizes) - 2 else [linear, nn.ReLU()]
    return nn.Sequential(*layers)
