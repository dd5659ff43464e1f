"""Networks to begin with: a perceptron, and convolutions over images.

Each builder but `mlp` takes the shape of one input and the number of outputs. Linear and convolutional layers begin
with He's normal weights (fan-in), as is usual with rectified units, and zero biases.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ntkfl.errors import ConfigError


def mlp(*sizes: int, gain: float = 1.0, bias: float = 0.0) -> nn.Sequential:
    """A multilayer perceptron with ReLU between layers: `mlp(784, 100, 10)` is the paper's network.

    Kaiming initialisation (normal, fan-in) with zero biases. Inputs of any shape are flattened first. The first layer's
    weights are multiplied by `gain`, and its biases begin at `bias`.
    """
    if len(sizes) < 2 or any(not isinstance(n, int) or n < 1 for n in sizes):
        raise ConfigError(f"a perceptron needs at least an input and an output size, all positive; got {list(sizes)}")
    layers: list[nn.Module] = [nn.Flatten()]
    for n_in, n_out in itertools.pairwise(sizes):
        linear = nn.Linear(n_in, n_out)
        _initialise(linear)
        if len(layers) == 1:
            with torch.no_grad():
                linear.weight.mul_(gain)
                linear.bias.fill_(bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _initialise(model: nn.Module) -> None:
    """He's normal weights (fan-in) and zero biases, in place."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


# Images


def cnn(inputs: Sequence[int], outputs: int, channels: Sequence[int] = (16, 32), width: int = 64) -> nn.Sequential:
    """Two strided convolutions and two linear layers: `cnn((1, 28, 28), 10)` has 57 thousand weights.

    5×5 with stride 2 to `channels[0]`, 3×3 with stride 2 to `channels[1]`, linear to `width`, linear to the outputs.
    """
    c, height, broad = _image(inputs)
    if min(height, broad) < 9:
        raise ConfigError(f"inputs of shape {list(inputs)} are too small for this network: at least 9 × 9 are needed")
    first, second = channels
    height, broad = ((side - 5) // 4 for side in (height, broad))  # behind both convolutions
    model = nn.Sequential(
        nn.Conv2d(c, first, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(first, second, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(second * height * broad, width),
        nn.ReLU(),
        nn.Linear(width, outputs),
    )
    _initialise(model)
    return model


class _Residual(nn.Module):
    """x + conv(relu(norm(conv(relu(norm(x)))))), the skip strided and widened where the block is."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(math.gcd(8, before), before),
            nn.ReLU(),
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(math.gcd(8, after), after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
        )
        same = before == after and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(before, after, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.skip(x) + self.body(x)
        return out


def resnet(inputs: Sequence[int], outputs: int, channels: Sequence[int] = (16, 32, 64)) -> nn.Sequential:
    """A small residual network, one block a stage, halved between stages: `resnet((3, 32, 32), 10)` has 78 thousand
    weights.

    Group normalisation in place of batch normalisation: it treats every sample alone, as a sample-wise Jacobian must,
    and keeps no statistics that clients could differ in.
    """
    c, height, broad = _image(inputs)
    if min(height, broad) < 2 ** (len(channels) - 1):
        raise ConfigError(f"inputs of shape {list(inputs)} are too small for {len(channels)} stages")
    blocks = [_Residual(channels[0], channels[0], 1), *(_Residual(a, b, 2) for a, b in itertools.pairwise(channels))]
    model = nn.Sequential(
        nn.Conv2d(c, channels[0], 3, padding=1, bias=False),
        *blocks,
        nn.GroupNorm(math.gcd(8, channels[-1]), channels[-1]),
        nn.ReLU(),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),  # the average over positions
        nn.Linear(channels[-1], outputs),
    )
    _initialise(model)
    return model


def _image(inputs: Sequence[int]) -> Sequence[int]:
    """Channels, height and width, of what has these."""
    if len(inputs) != 3:
        raise ConfigError(f"a convolutional network takes images [channels, height, width], not {list(inputs)}")
    return inputs
