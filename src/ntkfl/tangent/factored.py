"""The factored form: each layer's derivatives as the thin factors they are products of, exact and far smaller.

A layer type is one class here: a `Block` that also says which module it belongs to, how to run that module with its
parameters held fixed, and how to build itself from the recorded calls. `LAYERS` is the list of those known.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ntkfl.tangent.jacobian import Block


class Call(NamedTuple):
    """One use of a layer in a forward pass: its input, and ∂f/∂(its output) for each of the d2 outputs."""

    input: Tensor  # [N, ..., n_in]
    sensitivity: Tensor  # [N, d2, ..., n_out]


class LayerBlock(Block):
    """A block that knows its layer type."""

    module: ClassVar[type[nn.Module]]
    parameters: ClassVar[tuple[str, ...]]

    @staticmethod
    @abstractmethod
    def run_fixed(module: nn.Module, x: Tensor) -> Tensor:
        """The module's output with its parameters detached, so that autograd sees only the way through the input."""

    @classmethod
    @abstractmethod
    def from_calls(cls, calls: Sequence[Call], columns: tuple[slice | None, ...]) -> Self:
        """The block of all calls summed; `columns` follow `parameters`, None where there is none or it is frozen."""


class LinearBlock(LayerBlock):
    """`out = W a + b` used T times a sample: rows Σ_t g_t ⊗ [a_t, 1].

    a: [N, T, n_in]; g: [N, d2, T·n_out] (a frozen W or b has no columns).
    """

    module = nn.Linear
    parameters = ("weight", "bias")

    def __init__(self, a: Tensor, g: Tensor, weight: slice | None, bias: slice | None) -> None:
        self.a, self.g = a, g
        self.weight, self.bias = weight, bias
        self.T, self.n_in = a.shape[1], a.shape[2]
        self.n_out = g.shape[2] // self.T

    @staticmethod
    def run_fixed(module: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(module, nn.Linear)
        return F.linear(x, module.weight.detach(), None if module.bias is None else module.bias.detach())

    @classmethod
    def from_calls(cls, calls: Sequence[Call], columns: tuple[slice | None, ...]) -> Self:
        inputs = [c.input.reshape(c.input.shape[0], -1, c.input.shape[-1]) for c in calls]
        outputs = [c.sensitivity.flatten(start_dim=2) for c in calls]
        a = inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=1)
        g = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        weight, bias = columns
        return cls(a.contiguous(), g.contiguous(), weight, bias)

    @property
    def layout(self) -> Hashable:
        spans = tuple(None if s is None else (s.start, s.stop) for s in (self.weight, self.bias))
        return ("linear", spans, self.T, self.n_in, self.n_out)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.a, self.g)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Self:
        a, g = tensors
        return type(self)(a, g, self.weight, self.bias)

    def add_jvp(self, out: Tensor, delta: Tensor) -> None:
        lead, N = delta.shape[:-1], self.a.shape[0]
        rows = self.a.view(N * self.T, self.n_in)
        moved: Tensor | None = None  # the change of the layer's outputs, [..., N·T, n_out]
        if self.weight is not None:
            moved = rows @ delta[..., self.weight].reshape(*lead, self.n_out, self.n_in).mT
        if self.bias is not None:
            shift = delta[..., self.bias].unsqueeze(-2)
            moved = shift.expand(*lead, N * self.T, self.n_out) if moved is None else moved.add_(shift)
        assert moved is not None
        out += _rowwise(self.g, moved.reshape(*lead, N, self.T * self.n_out))

    def add_vjp(self, out: Tensor, cotangent: Tensor) -> None:
        lead, N = cotangent.shape[:-2], self.a.shape[0]
        pulled = _rowwise(self.g.mT, cotangent).reshape(*lead, N * self.T, self.n_out)
        if self.weight is not None:
            product = pulled.mT @ self.a.view(N * self.T, self.n_in)
            out[..., self.weight] += product.reshape(*lead, self.n_out * self.n_in)
        if self.bias is not None:
            out[..., self.bias] += pulled.sum(dim=-2)

    def gram(self, other: Self) -> Tensor:
        """T = 1: the Hadamard product of the inputs' and the sensitivities' Gram matrices. T > 1: summed over pairs."""
        d2 = self.g.shape[1]
        mine, theirs = self.g.view(-1, d2, self.T, self.n_out), other.g.view(-1, d2, self.T, self.n_out)
        total: Tensor | None = None
        for t in range(self.T):
            left = mine[:, :, t].flatten(1)
            for u in range(self.T):
                sensitivities = left @ theirs[:, :, u].flatten(1).T
                if self.weight is not None:
                    inputs = self.a[:, t] @ other.a[:, u].T
                    sensitivities *= inputs.add_(1) if self.bias is not None else inputs
                total = sensitivities if total is None else total.add_(sensitivities)
        assert total is not None
        return total

    def write_dense(self, out: Tensor) -> None:
        N, d2 = self.g.shape[:2]
        g = self.g.view(N, d2, self.T, self.n_out)
        if self.weight is not None:
            out[..., self.weight] = torch.einsum("njto,nti->njoi", g, self.a).reshape(N, d2, -1)
        if self.bias is not None:
            out[..., self.bias] = g.sum(dim=2)


def _rowwise(matrices: Tensor, vectors: Tensor) -> Tensor:
    """A matrix for each row: [N, p, q] and [..., N, q] -> [..., N, p]."""
    if vectors.ndim == 2:
        return torch.bmm(matrices, vectors.unsqueeze(-1)).squeeze(-1)
    return torch.einsum("npq,...nq->...np", matrices, vectors)


LAYERS: dict[type[nn.Module], type[LayerBlock]] = {layer.module: layer for layer in (LinearBlock,)}
