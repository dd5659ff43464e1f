"""Chains of layers on a CPU: the backward passes for all d2 outputs as one, by hand.

`torch.vmap` over autograd's backward pass does the same for any network, but PyTorch's rules put outputs before
samples, which every block must undo, and its transposed convolution with a stride runs at a fifth of the speed of a
matrix product. Here cotangents are [N, d2, …], as blocks have them, and those that a convolution made [N, *S, d2, C],
so that its filter is the same matrix product at every position.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ntkfl.tangent.layers.activation import ELEMENTWISE, with_slope
from ntkfl.tangent.layers.convolution import Geometry, inner_geometry

_Chain = list[tuple[str, nn.Module]]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout2d)  # in eval mode


class Cotangents(NamedTuple):
    """Of numbers [N, …], for all d2 outputs: [N, d2, …], or of images [N, C, *S] by position, [N, *S, d2, C]."""

    each: Tensor
    by_position: bool = False

    def by_sample(self) -> Tensor:
        return self.each.movedim((-2, -1), (1, 2)) if self.by_position else self.each

    def at_positions(self) -> Tensor:
        return self.each if self.by_position else self.each.movedim((1, 2), (-2, -1)).contiguous()


class Passed(NamedTuple):
    """A layer's input, and the cotangents of its output."""

    input: Tensor
    cotangents: Cotangents


Pull = Callable[[Cotangents], Cotangents]  # of a layer's output -> of its input


def find_chain(model: nn.Module, x: Tensor, untouched: Callable[[nn.Module], bool]) -> _Chain | None:
    """The model's layers in order, if it is an `nn.Sequential` of layers that a chain knows; None if not.

    `untouched`: whether a module computes what its class does.
    """
    if x.device.type != "cpu" or not x.is_floating_point() or type(model) is not nn.Sequential:
        return None
    chain: _Chain = []
    for name, module in model.named_modules(remove_duplicate=False):
        if not untouched(module):
            return None
        if type(module) is not nn.Sequential:
            chain.append((name, module))
    with torch.no_grad():
        x = x.clone()  # a layer may work in place
        for _, module in chain:
            if not _known(module, x):
                return None
            x = module(x)
    return chain if x.ndim == 2 and len({id(module) for _, module in chain}) == len(chain) else None


def _known(module: nn.Module, x: Tensor) -> bool:
    kind = type(module)  # a subclass may compute something else
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        inside = x.ndim == len(module.kernel_size) + 2 and inner_geometry(module, x) is not None
        return kind in _CONVOLUTIONS and inside and module.groups == 1
    if isinstance(module, nn.Flatten):
        return kind is nn.Flatten and (module.start_dim, module.end_dim) in ((1, -1), (1, x.ndim - 1)) and x.ndim > 1
    return (kind is nn.Linear and x.ndim == 2) or kind in (*IDENTITIES, *ELEMENTWISE)


def backward(chain: _Chain, x: Tensor, wanted: set[str], outputs: int) -> dict[str, Passed]:
    """What the `wanted` layers pass on: one forward pass, and one backward pass for all outputs."""
    inputs: dict[str, Tensor] = {}
    pulls: list[tuple[str, Pull]] = []
    for name, module in chain:
        inputs[name] = x
        x, pull = _forward(module, x)
        pulls.append((name, pull))
    at = Cotangents(torch.eye(outputs, dtype=x.dtype, device=x.device).repeat(len(x), 1, 1))
    passed: dict[str, Passed] = {}
    for name, pull in reversed(pulls):
        if name in wanted:
            passed[name] = Passed(inputs[name], at)
            if len(passed) == len(wanted):
                break
        at = pull(at)
    return passed


def _forward(module: nn.Module, x: Tensor) -> tuple[Tensor, Pull]:
    if isinstance(module, nn.Linear):
        return module(x), lambda at: Cotangents(at.each @ module.weight)
    if isinstance(module, _CONVOLUTIONS):
        geometry = inner_geometry(module, x)
        assert geometry is not None
        size, how = x.shape[2:], geometry
        return module(x), lambda at: _pull_convolution(at, module.weight, how, size)
    if isinstance(module, nn.Flatten):
        shape = x.shape[1:]
        return x.flatten(1), lambda at: Cotangents(at.each.unflatten(2, shape))
    if type(module) in IDENTITIES:
        return x, lambda at: at
    return _elementwise(module, x)


def _elementwise(module: nn.Module, x: Tensor) -> tuple[Tensor, Pull]:
    """The derivative is a number for each number of x, whichever output it is for."""
    out, slope = with_slope(module, x)

    def pull(at: Cotangents) -> Cotangents:
        factor = slope.movedim(1, -1).unsqueeze(-2).contiguous() if at.by_position else slope.unsqueeze(1)
        at.each.mul_(factor)  # nobody else has it: a layer with weights passes on a new one
        return at

    return out, pull


def _pull_convolution(at: Cotangents, weight: Tensor, how: Geometry, size: torch.Size) -> Cotangents:
    """Through one tap of the filter after the other: what a position passes to the input that the tap saw there."""
    each = at.at_positions()
    N, d2, C_in = len(each), each.shape[-2], weight.shape[1]
    spread = each.new_zeros(N, *(n + 2 * p for n, p in zip(size, how.padding, strict=True)), d2, C_in)
    rows, positions = each.reshape(-1, each.shape[-1]), each.shape[1:-2]
    taps = weight.movedim((0, 1), (-2, -1)).contiguous()  # [*kernel, C_out, C_in]
    part = each.new_empty(len(rows), C_in)
    for tap in itertools.product(*(range(k) for k in how.kernel)):
        torch.mm(rows, taps[tap], out=part)
        starts = (i * d for i, d in zip(tap, how.dilation, strict=True))
        seen = [slice(a, a + (m - 1) * s + 1, s) for a, m, s in zip(starts, positions, how.stride, strict=True)]
        spread[(slice(None), *seen)] += part.view(N, *positions, d2, C_in)
    inside = [slice(p, p + n) for p, n in zip(how.padding, size, strict=True)]
    return Cotangents(spread[(slice(None), *inside)].contiguous(), by_position=True)


def filter_derivatives(passed: Passed, how: Geometry, bias: bool) -> Tensor:
    """∂f/∂(filters) [N, d2, C_out·C_in·K], and with `bias` ∂f/∂bias behind them, by one product for each sample."""
    each = passed.cotangents.at_positions()
    N, d2, C_out = len(each), *each.shape[-2:]
    each = each.view(N, -1, d2 * C_out)
    patches = how.patches(passed.input).squeeze(1)  # [N, C_in·K, P]
    k = C_out * patches.shape[1]
    out = each.new_empty(N, d2, k + C_out if bias else k)
    out[..., :k].view(N, d2, C_out, -1).copy_(torch.bmm(patches, each).view(N, -1, d2, C_out).permute(0, 2, 3, 1))
    if bias:
        out[..., k:] = each.sum(1).view(N, d2, C_out)
    return out
