"""Sequence models that experiments train, over images row by row: `ntkfl_experiments.networks:gru`.

Each builder takes the shape of one input and the number of outputs; weights begin as the models' fields have it. For
tokens put an `nn.Embedding` in front.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ntkfl.errors import ConfigError


def _steps(x: Tensor) -> Tensor:
    """Inputs as sequences of vectors [N, T, features]: an image [C, H, W] gives its H rows of C·W numbers."""
    return x.movedim(1, 2).flatten(2) if x.ndim == 4 else x


def _sizes(inputs: Sequence[int]) -> tuple[int, int]:
    """(T, features) of inputs of this shape."""
    if len(inputs) not in (2, 3):
        raise ConfigError(f"a sequence model takes images [C, H, W] or sequences [T, features], not {list(inputs)}")
    *channels, steps, features = inputs
    return steps, math.prod(channels) * features


class _Recurrent(nn.Module):
    """head(h_T) of a GRU's last state h_T [N, width]."""

    def __init__(self, features: int, outputs: int, width: int) -> None:
        super().__init__()
        self.recurrent = nn.GRU(features, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.recurrent(_steps(x))
        out: Tensor = self.head(states[:, -1])
        return out


def gru(inputs: Sequence[int], outputs: int, width: int = 64) -> nn.Module:
    """A gated recurrent network that reads an image row by row and answers at the end.

    Glorot weights into the gates, orthogonal ones from step to step, zero biases.
    """
    model = _Recurrent(_sizes(inputs)[1], outputs, width)
    for name, p in model.recurrent.named_parameters():
        for gate in p.detach().chunk(3):
            if name.startswith("bias"):
                nn.init.zeros_(gate)
            else:
                (nn.init.xavier_uniform_ if "ih" in name else nn.init.orthogonal_)(gate)
    nn.init.xavier_uniform_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return model


class _Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.before_attention(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.before_mlp(x))
        return out


class _Transformer(nn.Module):
    """head(mean over positions of norm(blocks(front(x) + position))), `front` one linear layer for all rows."""

    def __init__(self, steps: int, features: int, outputs: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.front = nn.Linear(features, width)
        self.position = nn.Parameter(0.02 * torch.randn(steps, width))
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.blocks(self.front(_steps(x)) + self.position)).mean(1))
        return out


def transformer(inputs: Sequence[int], outputs: int, width: int = 32, heads: int = 4, layers: int = 1) -> nn.Module:
    """A small transformer encoder over an image's rows, averaged over positions at the end.

    Learned positions; normalisation before each part; linear weights of standard deviation 0.02, zero biases, output
    projections smaller by √(2 layers).
    """
    if width % heads:
        raise ConfigError(f"the width of a transformer must be a multiple of its {heads} heads, got {width}")
    model = _Transformer(*_sizes(inputs), outputs, width, heads, layers)
    for name, p in model.named_parameters():
        if p.ndim == 2 and "position" not in name:
            small = name.endswith(("out_proj.weight", "mlp.2.weight"))
            nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if small else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(p)
    nn.init.kaiming_normal_(model.front.weight, nonlinearity="linear")
    return model
