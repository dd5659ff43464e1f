"""Chains of layers: the backward passes for all d2 outputs as one, by hand, in half the time.

`torch.vmap` over autograd's backward pass does the same for any network, but PyTorch's rules put outputs before
samples, which every block must undo. Here cotangents are [N, d2, …], as blocks have them, and those of a convolution's
input are made when they are needed: the filters of the layer before want them a phase of the stride and a few samples
at a time, while they are in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ntkfl.tangent.layers.convolution import inner_geometry
from ntkfl.tangent.layers.geometry import Geometry

Chain = list[tuple[str, nn.Module]]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout2d)  # in eval mode
ELEMENTWISE: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
)  # fmt: skip
_CACHED_NUMBERS = 2**21  # cotangents of filters at a time, of which a phase of a stride of two has a quarter


class Spread(NamedTuple):
    """Cotangents [N, d2, C, *S] of a convolution's input, not made yet: those of its output, and what they meet."""

    each: Tensor  # [N, d2, C_out, *P]
    weight: Tensor
    how: Geometry
    size: torch.Size
    slope: Tensor | None = None  # [N, C, *S], a factor for every output alike

    def made(self) -> Tensor:
        """All of them."""
        out = self.how.input_gradient(self.each.flatten(0, 1), self.weight, self.size)
        out = out.view(*self.each.shape[:2], *out.shape[1:])
        return out if self.slope is None else out.mul_(self.slope.unsqueeze(1))

    def phases(self, rows: slice) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """Positions and their cotangents [n, d2, C, *positions], which are zero elsewhere, of these samples."""
        each = self.each[rows]
        for at, out in self.how.phases(each.flatten(0, 1), self.weight, self.size):
            out = out.view(*each.shape[:2], *out.shape[1:])
            if self.slope is not None:
                out.mul_(self.slope[(rows, slice(None), *at)].unsqueeze(1).contiguous())
            yield at, out


Cotangents = Tensor | Spread  # [N, d2, …] of numbers [N, …]
Pull = Callable[[Cotangents], Cotangents]  # of a layer's output -> of its input


def made(at: Cotangents) -> Tensor:
    """The cotangents as a tensor."""
    return at.made() if isinstance(at, Spread) else at


def find_chain(model: nn.Module, x: Tensor, untouched: Callable[[nn.Module], bool]) -> Chain | None:
    """The model's layers in order, if it is an `nn.Sequential` of layers that a chain knows; None if not.

    `untouched`: whether a module computes what its class does.
    """
    if not x.is_floating_point() or type(model) is not nn.Sequential:
        return None
    chain: Chain = []
    for name, module in model.named_modules(remove_duplicate=False):
        if not untouched(module):
            return None
        if type(module) is not nn.Sequential:
            if next(module.children(), None) is not None:  # which a layer of a chain does not use
                return None
            chain.append((name, module))
    x = x.clone()  # a layer may work in place
    for _, module in chain:
        if not _known(module, x):
            return None
        x = module(x)
    return chain if x.ndim == 2 and len({id(module) for _, module in chain}) == len(chain) else None


def _known(module: nn.Module, x: Tensor) -> bool:
    """Whether a chain has a rule for this layer and these numbers [N, …]."""
    kind = type(module)  # a subclass may compute something else
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        plain = kind in _CONVOLUTIONS and module.groups == 1 and {*module.dilation} == {1}
        return plain and x.ndim == len(module.kernel_size) + 2 and inner_geometry(module, x) is not None
    if isinstance(module, nn.Flatten):
        return kind is nn.Flatten and (module.start_dim, module.end_dim) in ((1, -1), (1, x.ndim - 1)) and x.ndim > 1
    return (kind is nn.Linear and x.ndim == 2) or kind in (*IDENTITIES, *ELEMENTWISE)


def backward(chain: Chain, x: Tensor, wanted: set[str], outputs: int) -> Iterator[tuple[str, Tensor, Cotangents]]:
    """The `wanted` layers from the last to the first, with their inputs and the cotangents of their outputs.

    One forward pass, and one backward pass for all outputs.
    """
    inputs: dict[str, Tensor] = {}
    pulls: list[tuple[str, Pull]] = []
    for name, module in chain:
        if name in wanted:
            inputs[name] = x
        x, pull = _forward(module, x)
        pulls.append((name, pull))
    at: Cotangents = torch.eye(outputs, dtype=x.dtype, device=x.device).repeat(len(x), 1, 1)
    while inputs:
        name, pull = pulls.pop()
        if name in inputs:
            input = inputs.pop(name)
            at = made(at) if inputs else at  # once, for this layer and those before it
            yield name, input, at
        at = pull(at) if inputs else at


def _forward(module: nn.Module, x: Tensor) -> tuple[Tensor, Pull]:
    """A layer's output, and how cotangents of it become those of its input: Aᵀ for a layer A, element by element
    else.
    """
    if isinstance(module, nn.Linear):
        return module(x), lambda at: made(at) @ module.weight
    if isinstance(module, _CONVOLUTIONS):
        geometry = inner_geometry(module, x)
        assert geometry is not None
        size, how = x.shape[2:], geometry
        return module(x), lambda at: Spread(made(at), module.weight, how, size)
    if isinstance(module, nn.Flatten):
        N, *shape = x.shape
        return x.flatten(1), lambda at: made(at).view(N, -1, *shape)
    if type(module) in IDENTITIES:
        return x, lambda at: at
    return _elementwise(module, x)


def _elementwise(module: nn.Module, x: Tensor) -> tuple[Tensor, Pull]:
    """The derivative is a number for each number of x, whichever output it is for."""
    if type(module) is nn.ReLU:
        out = x.relu()
        slope = out.sign()  # 0 or 1
    else:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = module(leaf.clone())  # a copy, for the layer may work in place
            (slope,) = torch.autograd.grad(out.sum(), leaf)
        out = out.detach()

    def pull(at: Cotangents) -> Cotangents:
        if isinstance(at, Spread):
            return at._replace(slope=slope if at.slope is None else slope * at.slope)
        return at.mul_(slope.unsqueeze(1))  # nobody else has it: a layer with weights passes on a new one

    return out, pull


def filter_derivatives(x: Tensor, at: Cotangents, how: Geometry, bias: bool) -> Tensor:
    """∂f/∂(filters) [N, d2, C_out·C_in·K], with `bias` ∂f/∂bias behind them: a product for each sample and phase."""
    N, d2 = at.each.shape[:2] if isinstance(at, Spread) else at.shape[:2]
    C_out = at.weight.shape[1] if isinstance(at, Spread) else at.shape[2]
    seen = x.shape[1] * math.prod(how.kernel)
    k = C_out * seen
    out = x.new_empty(N, d2, k + C_out if bias else k)
    few = max(1, _CACHED_NUMBERS // (d2 * C_out * math.prod(how.positions(x.shape[2:]))))
    for start in range(0, N, few):
        rows = slice(start, start + few)
        total = out.new_zeros(len(x[rows]), seen + bias, d2 * C_out)
        for positions, each in at.phases(rows) if isinstance(at, Spread) else [(None, at[rows])]:
            windows = how.windows(x[rows], positions)
            patches = each.new_ones(len(each), seen + bias, *each.shape[3:])  # a bias sees ones
            patches[:, :seen].view(windows.shape).copy_(windows)
            total.baddbmm_(patches.flatten(2), each.flatten(1, 2).flatten(2).mT)
        values = total.view(-1, seen + bias, d2, C_out)
        out[rows, :, :k].view(-1, d2, C_out, seen).copy_(values[:, :seen].permute(0, 2, 3, 1))
        if bias:
            out[rows, :, k:] = values[:, seen]
    return out
