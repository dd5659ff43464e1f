"""The dense form: every derivative stored. The reference for the others, and the block for layers they do not know."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Self

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from ntkfl.tangent.jacobian import Block, row_norms
from ntkfl.tangent.parameters import call_with, column_slices
from ntkfl.tangent.products import row_products


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
        """Values [N·d2, k] times the δ of these columns."""
        picked = torch.cat([delta[..., s] for s in self.columns], dim=-1)
        N, d2, k = self.values.shape
        out += (picked @ self.values.view(N * d2, k).T).view(out.shape)

    def add_vjp(self, out: Tensor, cotangent: Tensor) -> None:
        """The transpose: R as one row [N·d2]."""
        N, d2, k = self.values.shape
        self.scatter(out, cotangent.reshape(*cotangent.shape[:-2], N * d2) @ self.values.view(N * d2, k))

    def scatter(self, out: Tensor, values: Tensor) -> None:
        """out [..., d] += values [..., k] at this block's columns."""
        widths = [s.stop - s.start for s in self.columns]
        for span, part in zip(self.columns, torch.split(values, widths, -1), strict=True):
            out[..., span] += part

    def gram(self, other: Self) -> Tensor:
        """Inner products of rows [d2·k]: N·N'·d2·k operations."""
        rows = self.values.flatten(1)
        return row_products(rows, rows if other is self else other.values.flatten(1))

    def write_dense(self, out: Tensor) -> None:
        self.scatter(out, self.values)

    def norms(self) -> Tensor:
        return row_norms(self.values)

    def scaled(self, factors: Tensor) -> Self:
        return self.with_tensors((self.values * factors[:, None, None],))


def dense_block(
    model: nn.Module,
    x: Tensor,
    names: list[str],
    values: Mapping[str, Tensor],
    graph: bool = False,
    contract: Tensor | None = None,
) -> DenseBlock:
    """∂f/∂(the parameters in `names`) at `values` for each row of x; cost and memory N·d2·k.

    `torch.func` maps a backward pass over samples, for one output after the other, and not all of PyTorch's rules for
    that are right or there. So its result is compared with a plain backward pass over the same rows, which costs a
    d2-th as much, before it is used; else every output of every sample takes a backward pass of its own.
    `graph`: keep what gradients of the derivatives need. `contract`: S [N, c, d2], for S ∂f/∂(the parameters) in place
    of it; cost and memory N·c·k.
    """
    S = torch.empty(len(x), 0) if contract is None else contract
    chosen = {name: values[name] if graph else values[name].detach() for name in names}
    slices = column_slices(values)

    def output(chosen: Mapping[str, Tensor], sample: Tensor, S: Tensor) -> Tensor:
        f = call_with(model, {**values, **chosen}, sample.unsqueeze(0)).squeeze(0)
        return f if contract is None else S @ f

    def block(derivatives: Mapping[str, Tensor]) -> DenseBlock:
        flat = [derivatives[name].flatten(start_dim=2) for name in names]
        return DenseBlock(torch.cat(flat, dim=-1), tuple(slices[name] for name in names))

    try:
        found = block(vmap(jacrev(output, chunk_size=1), in_dims=(None, 0, 0))(chosen, x, S))
        few = slice(None if contract is None else 2)  # where the check would cost as much as what it checks
        R, expected = plain_product(model, x[few], chosen, None if contract is None else contract[few])
        if agree(R.reshape(-1) @ found.values[few].flatten(0, 1), expected):
            return found
    except RuntimeError:  # an operation without a rule (fused recurrent cells)
        pass
    with torch.enable_grad():
        leaves = {name: value if graph else value.requires_grad_() for name, value in chosen.items()}
        rows = [[_gradients(f, leaves, graph) for f in output(leaves, *own)] for own in zip(x, S, strict=True)]
    return block({name: torch.stack([torch.stack([g[name] for g in row]) for row in rows]) for name in names})


def _gradients(f: Tensor, leaves: Mapping[str, Tensor], graph: bool) -> dict[str, Tensor]:
    """∂f/∂leaf of one number f, by name."""
    found = torch.autograd.grad(f, [*leaves.values()], retain_graph=True, create_graph=graph, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def agree(ours: Tensor, plain: Tensor) -> bool:
    """Whether a product of a Jacobian is the one of a plain backward pass, up to the rounding of a few layers.

    True where the latter is not finite: the error to report is then another.
    """
    ours = ours.detach()
    tolerance = 1e-8 if plain.dtype == torch.float64 else 1e-3
    scale = float(plain.norm())
    return not math.isfinite(scale) or float((ours - plain).norm()) <= tolerance * max(scale, 1e-6)


def plain_product(
    model: nn.Module, x: Tensor, values: Mapping[str, Tensor], contract: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A random cotangent R [N, d2] and Jᵀ R [k], by one backward pass over all rows: what a Jacobian is checked by.
    With S [N, c, d2], R is [N, c] and the product (S J)ᵀ R.

    R is the same in every process.
    """
    leaves = {name: value.detach().clone().requires_grad_() for name, value in values.items()}
    with torch.enable_grad():
        f = call_with(model, leaves, x)
        f = f if contract is None else (contract @ f.unsqueeze(2)).squeeze(2)
        R = torch.randn(f.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(f)
        gradients = torch.autograd.grad((f * R).sum(), [*leaves.values()], materialize_grads=True)
    return R, torch.cat([g.to_dense().reshape(-1) for g in gradients])
