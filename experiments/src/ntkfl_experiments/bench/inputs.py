"""Inputs to time on: real images where they are on this machine, else ones alike in what matters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ntkfl.data.catalog import load, locate
from ntkfl.errors import DataError

_CLASSES = 10
_REAL = 60_000  # images of Fashion-MNIST


def fashion(count: int) -> tuple[Tensor, Tensor, str]:
    """x [count, 784], y [count], their name: Fashion-MNIST if it is here (nothing is downloaded), else `synthetic`."""
    try:
        if locate("fashion-mnist") is not None:
            data = load("fashion-mnist")
            rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:count]
            x, y = data.rows.take(rows)
            return x.flatten(1).contiguous(), y, "Fashion-MNIST"
    except DataError:
        pass  # a broken copy is `ntkfl data`'s to complain about
    return *synthetic(count), "synthetic images"


def many(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """x [count, 784], y [count] on the device: all of `fashion`, again and again with fresh noise of a tenth."""
    x, y, _ = fashion(_REAL)
    x, y = x.to(device), y.to(device)
    rows = torch.arange(count, device=device) % len(x)
    out = torch.empty(count, x.shape[1], device=device)
    torch.manual_seed(0)
    for at in range(0, count, len(x)):
        out[at : at + len(x)] = x[: count - at]
        if at:
            out[at : at + len(x)] += 0.1 * torch.randn_like(out[at : at + len(x)])
    return out, y[rows]


def synthetic(count: int, side: int = 28) -> tuple[Tensor, Tensor]:
    """Normalised images of ten classes: x [count, side²], y [count].

    Neighbouring pixels go together and all images share a bright middle, so that the tangent kernel has the one
    huge eigenvalue and the long tail that real images give it: that stiffness decides what the evolution costs.
    """
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(_CLASSES, (count,), generator=generator)
    classes = _smooth(_CLASSES, side, generator)
    middle = torch.hann_window(side + 2, periodic=False)[1:-1]
    shape = classes[y] + 0.6 * _smooth(count, side, generator)
    noise = 0.05 * torch.randn(count, side, side, generator=generator)
    pixels = (1.3 * torch.outer(middle, middle) * (0.5 + 0.5 * shape) + noise).clamp(0, 1).flatten(1)
    return (pixels - pixels.mean()) / pixels.std(), y


def _smooth(count: int, side: int, generator: torch.Generator) -> Tensor:
    coarse = torch.randn(count, 1, 5, 5, generator=generator)
    return F.interpolate(coarse, size=(side, side), mode="bicubic", align_corners=True).squeeze(1)
