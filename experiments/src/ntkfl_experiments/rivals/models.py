"""Networks that rivals train: random features of the inputs with a linear head, and LeNet.

Random Fourier features (Rahimi & Recht 2007, the Gaussian kernel) with `sum-ridge` train in one round, exactly, however
the samples are dealt: what a backbone's features are to AFL and Fed3R, without a backbone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ntkfl.errors import ConfigError
from ntkfl.models.backbone import Adapted, head


class RandomFeatures(nn.Module):
    """φ(x) = cos(xΩ + b), with Ω [d1, F] of entries N(0, scale²/d1) and b uniform on [0, 2π]: [N, ...] → [N, F].

    Both follow from `seed` alone, so that all parties have the same. `scale` is the inverse width of the Gaussian
    kernel, for inputs whose numbers have variance 1.
    """

    def __init__(self, inputs: int, features: int, scale: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        if features < 1 or scale <= 0:
            raise ConfigError(f"random features need a number and a scale above 0, got {features} and {scale:g}")
        draws = torch.Generator().manual_seed(seed)
        omega = torch.randn(inputs, features, generator=draws, device="cpu") * (scale / math.sqrt(inputs))
        self.register_buffer("omega", omega)
        self.register_buffer("offsets", torch.rand(features, generator=draws, device="cpu") * (2 * math.pi))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.offsets, x.flatten(1), self.omega).cos()  # type: ignore[arg-type]  # buffers are tensors


def random_features(
    inputs: Sequence[int], outputs: int, features: int = 1500, scale: float = 1.0, seed: int = 0
) -> Adapted:
    """A linear head, which begins at zero and alone trains, on `features` random features of inputs of this shape."""
    return head(RandomFeatures(math.prod(inputs), features, scale, seed), outputs, features=features)


def lenet(inputs: Sequence[int], outputs: int) -> nn.Sequential:
    """LeNet-5 with rectified units, as studies of federated CIFAR-10 have it: 62 thousand weights.

    Weights start as PyTorch draws them.
    """
    c, height, width = inputs
    flat = 16 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(c, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, outputs),
    )  # fmt: skip
