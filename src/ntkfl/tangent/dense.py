"""The dense form: every derivative stored. The reference for the others, and the block for layers they do not know."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from ntkfl.tangent.jacobian import Block, row_norms
from ntkfl.tangent.parameters import column_slices, trainable


class DenseBlock(Block):
    """values [N, d2, k] for the k columns listed by `columns`, in order."""

    def __init__(self, values: Tensor, columns: tuple[slice, ...]) -> None:
        self.values = values
        self.columns = columns

    @property
    def layout(self) -> Hashable:
        return ("dense", tuple((s.start, s.stop) for s in self.columns))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Self:
        return type(self)(tensors[0], self.columns)

    def add_jvp(self, out: Tensor, delta: Tensor) -> None:
        picked = torch.cat([delta[..., s] for s in self.columns], dim=-1)
        N, d2, k = self.values.shape
        out += (picked @ self.values.view(N * d2, k).T).view(out.shape)

    def add_vjp(self, out: Tensor, cotangent: Tensor) -> None:
        N, d2, k = self.values.shape
        product = cotangent.reshape(*cotangent.shape[:-2], N * d2) @ self.values.view(N * d2, k)
        at = 0
        for s in self.columns:
            out[..., s] += product[..., at : at + s.stop - s.start]
            at += s.stop - s.start

    def product(self, cotangent: Tensor) -> Tensor:
        rows = self.values.view(-1, self.values.shape[2])
        return (rows @ (cotangent.reshape(-1) @ rows)).view(cotangent.shape)

    def gram(self, other: Self) -> Tensor:
        return self.values.flatten(1) @ other.values.flatten(1).T

    def write_dense(self, out: Tensor) -> None:
        at = 0
        for s in self.columns:
            out[..., s] = self.values[..., at : at + s.stop - s.start]
            at += s.stop - s.start

    def norms(self) -> Tensor:
        return row_norms(self.values)

    def scaled(self, factors: Tensor) -> Self:
        return self.with_tensors((self.values * factors[:, None, None],))


def dense_block(model: nn.Module, x: Tensor, names: list[str]) -> DenseBlock:
    """∂f/∂(the parameters in `names`) for each row of x, through `torch.func`; cost and memory N·d2·k."""
    parameters = trainable(model)
    slices = column_slices(parameters)
    values = {name: parameters[name].detach() for name in names}

    def output(chosen: Mapping[str, Tensor], sample: Tensor) -> Tensor:
        result: Tensor = functional_call(model, dict(chosen), (sample.unsqueeze(0),))
        return result.squeeze(0)

    try:
        derivatives = vmap(jacrev(output), in_dims=(None, 0))(values, x)
    except RuntimeError:  # an operation without a batching rule (fused recurrent cells): a sample at a time
        derivatives = _one_at_a_time(model, x, values)
    flat = [derivatives[name].detach().flatten(start_dim=2) for name in names]
    return DenseBlock(torch.cat(flat, dim=-1), tuple(slices[name] for name in names))


def _one_at_a_time(model: nn.Module, x: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """N·d2 plain backward passes."""
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    rows: dict[str, list[Tensor]] = {name: [] for name in values}
    for sample in x:
        with torch.enable_grad():
            f = functional_call(model, leaves, (sample.unsqueeze(0),)).squeeze(0).unbind()
        per_output = [
            torch.autograd.grad(component, list(leaves.values()), retain_graph=True, materialize_grads=True)
            for component in f
        ]
        for name, gradients in zip(leaves, zip(*per_output, strict=True), strict=True):
            rows[name].append(torch.stack(gradients))
    return {name: torch.stack(stacked) for name, stacked in rows.items()}
