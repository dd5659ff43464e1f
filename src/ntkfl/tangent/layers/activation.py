"""Activations, an element at a time: their derivative is made once, whichever of the d2 outputs it is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ntkfl.tangent.layers.tape import Tape

ELEMENTWISE: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
)  # fmt: skip


def with_slope(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The module's output for x, which stays as it is, and its derivative there; both of x's shape."""
    if type(module) is nn.ReLU:
        out = x.relu()
        return out, out.sign()  # 0 or 1
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        # A copy, for the layer may work in place; its class's way, for its own may be replaced while it is on tape.
        out = type(module).forward(module, leaf.clone())
        (slope,) = torch.autograd.grad(out.sum(), leaf)
    return out.detach(), slope


class _Elementwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        out, slope = with_slope(module, x)
        ctx.save_for_backward(slope)
        return out

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        return cotangents[0] * ctx.saved_tensors[0], None


def run_elementwise(module: nn.Module, tape: Tape, input: Tensor) -> Any:
    """PyTorch's own backward pass, mapped over outputs, takes an exponential for each of them."""
    if tape.uses is None or getattr(module, "inplace", False):  # what is changed in place, others may see
        return NotImplemented
    taped: Callable[..., Tensor] = _Elementwise.apply
    return taped(input, module)
