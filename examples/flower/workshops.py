"""What the program beside this file trains: workshops' sensors, and a network of one's own."""

import numpy as np
import torch
from torch import Tensor, nn

TILTS = (-1.5, -0.5, 0.5, 1.5)  # each workshop sees another range of the first sensor
Batch = tuple[np.ndarray, np.ndarray]


def readings(samples: int, tilt: float, seed: int) -> Batch:
    """Six sensors, and whether the part will fail."""
    x = np.random.default_rng(seed).normal(size=(samples, 6))
    x[:, 0] += tilt
    return x, (x[:, 0] * x[:, 1] + x[:, 2] > 0.3).astype(int)


def workshop(number: int) -> Batch:
    return readings(150, TILTS[number], seed=number)


def east() -> Batch:
    """`ntkfl flower client … --data workshops:east`: a client's own data, read where it runs."""
    return workshop(0)


def west() -> Batch:
    return workshop(3)


def test() -> Batch:
    return readings(1000, 0.0, seed=99)


class Products(nn.Module):
    """Learns which sensors to multiply."""

    def __init__(self, inputs: int, outputs: int, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(inputs, width), nn.Linear(inputs, width)
        self.out = nn.Linear(width + inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.left(x) * self.right(x), x], dim=1))


def network(shape: tuple[int, ...], outputs: int, width: int = 16) -> nn.Module:
    """`name = "workshops:network"`: called with the shape of one input, the number of outputs, and the options."""
    return Products(shape[0], outputs, width)
