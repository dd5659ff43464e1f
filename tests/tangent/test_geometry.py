"""Convolutions' transposes and patches against autograd and against each other, in every geometry."""

from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ntkfl.tangent.layers.geometry import Geometry


@st.composite
def geometries(draw: st.DrawFn) -> tuple[Geometry, tuple[int, ...]]:
    """A filter's way over images of some size, in one to three dimensions."""
    D = draw(st.integers(1, 3))
    bounds = [(1, 4), (1, 4), (0, 4), (1, 3), (3, 9)]
    kernel, stride, padding, dilation, size = (
        tuple(draw(st.integers(low, high)) for _ in range(D)) for low, high in bounds
    )
    how = Geometry(kernel, stride, padding, dilation, draw(st.integers(1, 2)))
    assume(min(how.positions(size)) >= 1)
    return how, size


def images(how: Geometry, size: tuple[int, ...]) -> Tensor:
    return torch.randn(2, 2 * how.groups, *size, dtype=torch.float64)


@given(geometries())
@settings(max_examples=150, deadline=None)
def test_input_gradient_is_autograds(geometry: tuple[Geometry, tuple[int, ...]]) -> None:
    how, size = geometry
    x, weight = images(how, size).requires_grad_(), torch.randn(3 * how.groups, 2, *how.kernel, dtype=torch.float64)
    y = how.convolve(x, weight)
    cotangent = torch.randn_like(y)
    (truth,) = torch.autograd.grad(y, x, cotangent)
    assert (how.input_gradient(cotangent, weight, size) - truth).abs().max() <= 1e-12 * max(1, float(truth.abs().max()))


@given(geometries())
@settings(max_examples=150, deadline=None)
def test_phases_are_the_input_gradient_by_parts(geometry: tuple[Geometry, tuple[int, ...]]) -> None:
    """Each position once, and zero where no tap sees one."""
    how, size = geometry
    how = how._replace(dilation=(1,) * len(size), groups=1)
    cotangent = torch.randn(2, 3, *how.positions(size), dtype=torch.float64)
    weight = torch.randn(3, 2, *how.kernel, dtype=torch.float64)
    found = torch.zeros(2, 2, *size, dtype=torch.float64)
    for at, values in how.phases(cotangent, weight, size):
        found[(..., *at)] += values
    truth = how.input_gradient(cotangent, weight, size)
    assert (found - truth).abs().max() <= 1e-12 * max(1, float(truth.abs().max()))


@given(geometries(), st.data())
@settings(max_examples=100, deadline=None)
def test_windows_are_what_a_filter_meets(geometry: tuple[Geometry, tuple[int, ...]], data: st.DataObject) -> None:
    how, size = geometry
    x, weight = images(how, size), torch.randn(3 * how.groups, 2, *how.kernel, dtype=torch.float64)
    y = how.convolve(x, weight)
    patches, filters = how.patches(x), weight.view(how.groups, 3, -1)
    assert ((filters @ patches).view(y.shape) - y).abs().max() <= 1e-12 * max(1, float(y.abs().max()))
    at = [slice(data.draw(st.integers(0, m - 1)), m, data.draw(st.integers(1, 3))) for m in y.shape[2:]]
    assert torch.equal(how.windows(x, at), how.windows(x)[(..., *at)])
