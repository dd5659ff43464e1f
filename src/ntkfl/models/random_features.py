"""Random features of the inputs with a linear head: a kernel machine whose training is a linear problem.

Rahimi & Recht 2007 (Fourier features, the Gaussian kernel) and Cho & Saul 2009 (ReLU features, the arc-cosine kernel).
With `sum-ridge` it trains in one round, exactly, however the samples are dealt: what a backbone's features are to AFL
and Fed3R, without a backbone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ntkfl.errors import ConfigError, unknown
from ntkfl.models.backbone import Adapted, head

KINDS = ("fourier", "relu")


class RandomFeatures(nn.Module):
    """φ(x) = cos(xΩ + b), or max(0, xΩ + b), with Ω [d1, F] of entries N(0, scale²/d1): [N, ...] → [N, F].

    b is uniform on [0, 2π], or N(0, ¼). Both follow from `seed` alone, so that all parties have the same.
    """

    def __init__(self, inputs: int, features: int, kind: str = "fourier", scale: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        if kind not in KINDS:
            raise unknown("kind of features", kind, KINDS)
        if features < 1 or scale <= 0:
            raise ConfigError(f"random features need a number and a scale above 0, got {features} and {scale:g}")
        draws = torch.Generator().manual_seed(seed)
        omega = torch.randn(inputs, features, generator=draws, device="cpu") * (scale / math.sqrt(inputs))
        if kind == "fourier":
            offsets = torch.rand(features, generator=draws, device="cpu") * (2 * math.pi)
        else:
            offsets = torch.randn(features, generator=draws, device="cpu") / 2
        self.kind = kind
        self.register_buffer("omega", omega)
        self.register_buffer("offsets", offsets)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.addmm(self.offsets, x.flatten(1), self.omega)  # type: ignore[arg-type]  # buffers are tensors
        return z.cos() if self.kind == "fourier" else z.relu()


def random_features(
    inputs: Sequence[int],
    outputs: int,
    features: int = 1500,
    kind: str = "fourier",
    scale: float = 1.0,
    seed: int = 0,
) -> Adapted:
    """A linear head, which begins at zero and alone trains, on `features` random features of inputs of this shape.

    `kind` is fourier or relu; `scale` is the inverse width of the Gaussian kernel, for inputs whose numbers have
    variance 1.
    """
    return head(RandomFeatures(math.prod(inputs), features, kind, scale, seed), outputs, features=features)
