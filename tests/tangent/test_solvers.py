"""Steps of the stabilised method: its order and its stability."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ntkfl.tangent.solvers import chebyshev_step


def circle(y: Tensor) -> Tensor:
    """A field that is neither linear nor symmetric."""
    return torch.stack([-y[1] - 0.1 * y[0] ** 3, y[0] - y[1] ** 2])


def advance(field: Callable[[Tensor], Tensor], y: Tensor, h: float, steps: int, stages: int) -> Tensor:
    for _ in range(steps):
        y = chebyshev_step(field, y, field(y), h, stages)
    return y


@pytest.mark.parametrize("stages", [2, 3, 7, 20])
def test_second_order(stages: int) -> None:
    start = torch.tensor([0.4, -0.2], dtype=torch.float64)
    exact = advance(circle, start, 1 / 2048, 2048, 4)
    errors = [float((advance(circle, start, 1 / n, n, stages) - exact).norm()) for n in (16, 32)]
    assert 1.8 < math.log2(errors[0] / errors[1]) < 2.3


@pytest.mark.parametrize("stages", [3, 10, 60])
def test_stable_up_to_the_bound_it_promises(stages: int) -> None:
    """Along the whole negative axis up to (s² − 1)/1.54 nothing grows; well beyond it something does."""
    rates = torch.linspace(0, (stages**2 - 1) / 1.54, 500, dtype=torch.float64)
    y = torch.ones_like(rates)
    assert advance(lambda v: -rates * v, y, 1.0, 1, stages).abs().max() <= 1 + 1e-9
    assert advance(lambda v: -1.4 * rates * v, y, 1.0, 1, stages).abs().max() > 1.5
