"""The dense form: every derivative stored. The reference for the others, and the block for layers they do not know."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from ntkfl.tangent.gemm import products
from ntkfl.tangent.jacobian import Block, row_norms
from ntkfl.tangent.parameters import call_with, column_slices


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
        for span, part in zip(
            self.columns, torch.split(values, [s.stop - s.start for s in self.columns], -1), strict=True
        ):
            out[..., span] += part

    def product(self, cotangent: Tensor) -> Tensor:
        """Two products with the values, 4·N·d2·k operations."""
        rows = self.values.view(-1, self.values.shape[2])
        return (rows @ (cotangent.reshape(-1) @ rows)).view(cotangent.shape)

    def gram(self, other: Self) -> Tensor:
        """Inner products of rows [d2·k]: N·N'·d2·k operations."""
        rows = self.values.flatten(1)
        return products(rows, rows if other is self else other.values.flatten(1))

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

    `torch.func` maps operations over samples, and not all of PyTorch's rules for that are right: PReLU's backward pass,
    mapped over outputs within samples, takes one for the other where N = d2 > 1, and fails for other sizes. So its
    result is compared with a plain backward pass over the same rows, which costs a d2-th as much, before it is used.
    `graph`: keep what gradients of the derivatives need. `contract`: S [N, c, d2], for S ∂f/∂(the parameters) in place
    of it; cost and memory N·c·k.
    """
    S = torch.empty(len(x), 0, 0) if contract is None else contract
    chosen = {name: values[name] if graph else values[name].detach() for name in names}
    slices = column_slices(values)

    def output(chosen: Mapping[str, Tensor], sample: Tensor, S: Tensor) -> Tensor:
        f = call_with(model, {**values, **chosen}, sample.unsqueeze(0)).squeeze(0)
        return f if contract is None else S @ f

    def block(derivatives: Mapping[str, Tensor]) -> DenseBlock:
        flat = [derivatives[name].flatten(start_dim=2) for name in names]
        return DenseBlock(torch.cat(flat, dim=-1), tuple(slices[name] for name in names))

    plain: tuple[Tensor, Tensor] | None = None
    for derivative in (jacrev(output), jacrev(output, chunk_size=1)):  # all outputs at once, then one after the other
        try:
            found = block(vmap(derivative, in_dims=(None, 0, 0))(chosen, x, S))
        except RuntimeError:  # an operation without a rule (fused recurrent cells)
            continue
        R, expected = plain = plain or plain_product(model, x, chosen, contract)
        if agree(R.reshape(-1) @ found.values.flatten(0, 1), expected):
            return found
    return block(one_at_a_time(output, chosen, x, S, graph))


def agree(ours: Tensor, plain: Tensor) -> bool:
    """Whether a product of a Jacobian is the one of a plain backward pass, up to the rounding of a few layers.

    True where the latter is not finite: the error to report is then another.
    """
    ours = ours.detach()
    tolerance = 1e-8 if plain.dtype == torch.float64 else 1e-3
    scale = float(plain.norm())
    return not math.isfinite(scale) or float((ours - plain).norm()) <= tolerance * max(scale, 1e-6)


def random_cotangent(like: Tensor) -> Tensor:
    """The same numbers [N, d2] in every process: what a check multiplies a Jacobian with."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(device=like.device, dtype=like.dtype)


def pull_back(
    f: Tensor,
    inputs: Sequence[Tensor],
    cotangent: Tensor,
    retain_graph: bool = False,
    zeros: bool = True,
    graph: bool = False,
) -> tuple[Tensor, ...]:
    """(∂f/∂input)ᵀ R for each input, R = `cotangent` of f's shape: `torch.autograd.grad(f, inputs, R)`, bit for bit.
    Of an input that f does not depend on, zeros or None. `graph`: the results can be differentiated again.

    That call would import sympy to compare the shapes of f and R: a fifth of a second in every program that starts.
    Here R takes the place of the ones that a sum passes down.
    """
    with torch.enable_grad():
        alias = f.view_as(f)  # f may be an input too
        alias.register_hook(lambda _: cotangent)  # type: ignore[no-untyped-call]
        return torch.autograd.grad(
            alias.sum(),
            inputs,
            retain_graph=retain_graph or graph,
            create_graph=graph,
            allow_unused=True,
            materialize_grads=zeros,
        )


def plain_product(
    model: nn.Module, x: Tensor, values: Mapping[str, Tensor], contract: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A random cotangent R [N, d2] and Jᵀ R [k], by one backward pass over all rows: what a Jacobian is checked by.
    With S [N, c, d2], R is [N, c] and the product (S J)ᵀ R.
    """
    leaves = {name: value.detach().clone().requires_grad_() for name, value in values.items()}
    with torch.enable_grad():
        f = call_with(model, leaves, x)
    R = random_cotangent(f if contract is None else contract[:, :, 0])
    gradients = pull_back(f, list(leaves.values()), R if contract is None else (R.unsqueeze(1) @ contract).squeeze(1))
    return R, torch.cat([g.to_dense().reshape(-1) for g in gradients])


def one_at_a_time(
    output: Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor],
    values: Mapping[str, Tensor],
    x: Tensor,
    S: Tensor,
    graph: bool,
) -> dict[str, Tensor]:
    """N·d2 plain backward passes."""
    rows: dict[str, list[Tensor]] = {name: [] for name in values}
    with torch.enable_grad():
        leaves = {n: value.view_as(value) if graph else value.detach().requires_grad_() for n, value in values.items()}
        for sample, own in zip(x, S, strict=True):
            per_output = [
                torch.autograd.grad(
                    f, list(leaves.values()), retain_graph=True, create_graph=graph, materialize_grads=True
                )
                for f in output(leaves, sample, own).unbind()
            ]
            for name, gradients in zip(leaves, zip(*per_output, strict=True), strict=True):
                rows[name].append(torch.stack(gradients))
    return {name: torch.stack(stacked) for name, stacked in rows.items()}
