"""Layers that see a sample at a time in one way and a batch in another: every derivative against plain autograd.

Jacobians map operations over samples and outputs at once. PyTorch's rule for PReLU's backward pass confuses the two
where both are equally many, so each layer is tried with N = d2.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from tests.tangent.test_jacobian import autograd

EXACT = 1e-12  # float64, a few layers of numbers of order one

_IMAGE, _SERIES, _VOLUME, _ROW = (1, 4, 4), (2, 6), (1, 3, 3, 3), (5,)
_FIRST: dict[tuple[int, ...], Callable[[], nn.Module]] = {
    _IMAGE: lambda: nn.Conv2d(1, 4, 3, padding=1),
    _SERIES: lambda: nn.Conv1d(2, 4, 3, padding=1),
    _VOLUME: lambda: nn.Conv3d(1, 4, 2),
    _ROW: lambda: nn.Linear(5, 4),
}
LAYERS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "PReLU per channel, 2-d": (_IMAGE, lambda: nn.PReLU(4)),
    "PReLU per channel, 1-d": (_SERIES, lambda: nn.PReLU(4)),
    "PReLU per channel, 3-d": (_VOLUME, lambda: nn.PReLU(4)),
    "PReLU per unit": (_ROW, lambda: nn.PReLU(4)),
    "PReLU, one weight, 2-d": (_IMAGE, nn.PReLU),
    "PReLU, one weight": (_ROW, nn.PReLU),
    "PReLU twice": (_IMAGE, lambda: nn.Sequential(nn.PReLU(4), nn.Conv2d(4, 4, 3), nn.PReLU(4))),
    "PReLU behind BatchNorm": (_IMAGE, lambda: nn.Sequential(nn.BatchNorm2d(4), nn.PReLU(4))),
    "RReLU": (_IMAGE, nn.RReLU),
    "BatchNorm1d": (_ROW, lambda: nn.BatchNorm1d(4)),
    "BatchNorm2d": (_IMAGE, lambda: nn.BatchNorm2d(4)),
    "InstanceNorm1d": (_SERIES, lambda: nn.InstanceNorm1d(4, affine=True)),
    "InstanceNorm2d": (_IMAGE, lambda: nn.InstanceNorm2d(4, affine=True)),
    "InstanceNorm2d, running": (_IMAGE, lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "GroupNorm": (_IMAGE, lambda: nn.GroupNorm(2, 4)),
    "LayerNorm": (_IMAGE, lambda: nn.LayerNorm([4, 4, 4])),
    "Softmax2d": (_IMAGE, nn.Softmax2d),
    "ChannelShuffle": (_IMAGE, lambda: nn.ChannelShuffle(2)),
    "PixelShuffle": (_IMAGE, lambda: nn.PixelShuffle(2)),
    "LocalResponseNorm": (_IMAGE, lambda: nn.LocalResponseNorm(2)),
    "GLU": (_IMAGE, lambda: nn.GLU(1)),
    "Dropout2d": (_IMAGE, nn.Dropout2d),
    "LPPool2d": (_IMAGE, lambda: nn.LPPool2d(2, 2)),
    "AdaptiveMaxPool2d": (_IMAGE, lambda: nn.AdaptiveMaxPool2d(2)),
    "ReflectionPad2d": (_IMAGE, lambda: nn.ReflectionPad2d(1)),
    "Unfold": (_IMAGE, lambda: nn.Unfold(2)),
    "ConvTranspose2d": (_IMAGE, lambda: nn.ConvTranspose2d(4, 4, 2)),
    "Upsample": (_IMAGE, lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
}


def network(name: str, N: int, d2: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    shape, layer = LAYERS[name]
    model = nn.Sequential(_FIRST[shape](), layer(), nn.Flatten(), nn.LazyLinear(d2))
    model(torch.randn(6, *shape))  # makes the last layer, and running statistics where there are any
    return model.double().eval(), torch.randn(N, *shape, dtype=torch.float64)


@pytest.mark.parametrize("form", ["auto", "dense"])
@pytest.mark.parametrize("name", LAYERS)
def test_equals_autograd_where_samples_are_as_many_as_outputs(name: str, form: str) -> None:
    for size in (2, 3):
        model, x = network(name, size, size)
        assert (ntkfl.jacobian(model, x, form=form).dense() - autograd(model, x)).abs().max() < EXACT


@pytest.mark.parametrize("form", ["auto", "dense"])
@pytest.mark.parametrize(("N", "d2", "chunk"), [(1, 1, 1), (4, 1, 4), (1, 3, 1), (5, 3, 5), (7, 3, 3)])
def test_prelu_at_other_sizes_and_in_chunks(N: int, d2: int, chunk: int, form: str) -> None:
    model, x = network("PReLU per channel, 2-d", N, d2)
    assert (ntkfl.jacobian(model, x, form=form, chunk=chunk).dense() - autograd(model, x)).abs().max() < EXACT
