"""The dense form: every derivative stored. The reference for the others, and the block for layers they do not know."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from ntkfl.tangent.gemm import is_fast, times_transposed
from ntkfl.tangent.jacobian import Block, row_norms
from ntkfl.tangent.parameters import call_with, column_slices, trainable


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
        rows = self.values.flatten(1)
        return products(rows, rows if other is self else other.values.flatten(1))

    def write_dense(self, out: Tensor) -> None:
        at = 0
        for s in self.columns:
            out[..., s] = self.values[..., at : at + s.stop - s.start]
            at += s.stop - s.start

    def norms(self) -> Tensor:
        return row_norms(self.values)

    def scaled(self, factors: Tensor) -> Self:
        return self.with_tensors((self.values * factors[:, None, None],))


_STRIP = 64  # rows of a symmetric matrix at a time, on a CPU


def products(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left rightᵀ, [N, k] and [N', k] -> [N, N'], added to `out` if given.

    Where both are one tensor (and `out` is symmetric), what is below the diagonal is taken from above it.
    """
    out = left.new_zeros(len(left), len(right)) if out is None else out
    if left is not right or left.device.type != "cpu":
        return out.add_(times_transposed(left, right)) if is_fast(left) else out.addmm_(left, right.T)
    for at in range(0, len(left), _STRIP):
        end = at + _STRIP
        if is_fast(left):
            out[at:end, at:] += times_transposed(left[at:end], left[at:])
        else:
            out[at:end, at:].addmm_(left[at:end], left[at:].T)
        out[end:, at:end] = out[at:end, end:].T
    return out


def dense_block(model: nn.Module, x: Tensor, names: list[str]) -> DenseBlock:
    """∂f/∂(the parameters in `names`) for each row of x, through `torch.func`; cost and memory N·d2·k.

    The fast ways map operations over samples, and not all of PyTorch's rules for that are right: PReLU's backward
    pass, mapped over outputs within samples, takes one for the other where N = d2 > 1, and fails for other sizes. So a
    result is compared with a plain backward pass over the same rows, which costs a d2-th as much, before it is used.
    """
    parameters = trainable(model)
    slices = column_slices(parameters)
    values = {name: parameters[name].detach() for name in names}

    def output(chosen: Mapping[str, Tensor], sample: Tensor) -> Tensor:
        return call_with(model, chosen, sample.unsqueeze(0)).squeeze(0)

    columns = {name: slices[name] for name in names}
    plain: tuple[Tensor, Tensor] | None = None
    for derivative in (jacrev(output), jacrev(output, chunk_size=1)):  # all outputs at once, then one after the other
        try:
            block = _joined(vmap(derivative, in_dims=(None, 0))(values, x), columns)
        except RuntimeError:  # an operation without a rule (fused recurrent cells)
            continue
        plain = plain or _plain_product(model, x, values, block.values.shape[1])
        if agree(plain[0].reshape(-1) @ block.values.flatten(0, 1), plain[1]):
            return block
    return _joined(one_at_a_time(model, x, values), columns)


def agree(ours: Tensor, plain: Tensor) -> bool:
    """Whether a product of a Jacobian is the one of a plain backward pass, up to the rounding of a few layers.

    True where the latter is not finite: the error to report is then another.
    """
    tolerance = 1e-8 if plain.dtype == torch.float64 else 1e-3
    scale = float(plain.norm())
    return not math.isfinite(scale) or float((ours - plain).norm()) <= tolerance * max(scale, 1e-6)


def random_cotangent(shape: tuple[int, int], like: Tensor) -> Tensor:
    """The same numbers [N, d2] in every process: what a check multiplies a Jacobian with."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device=like.device, dtype=like.dtype)


def pull_back(
    f: Tensor, inputs: Sequence[Tensor], cotangent: Tensor, retain_graph: bool = False, zeros: bool = True
) -> tuple[Tensor, ...]:
    """(∂f/∂input)ᵀ R for each input, R = `cotangent` of f's shape: `torch.autograd.grad(f, inputs, R)`, bit for bit.
    Of an input that f does not depend on, zeros or None.

    That call would import sympy to compare the shapes of f and R: a fifth of a second in every program that starts.
    Here R takes the place of the ones that a sum passes down.
    """
    with torch.enable_grad():
        alias = f.view_as(f)  # f may be an input too
        alias.register_hook(lambda _: cotangent)  # type: ignore[no-untyped-call]
        return torch.autograd.grad(
            alias.sum(), inputs, retain_graph=retain_graph, allow_unused=True, materialize_grads=zeros
        )


def _plain_product(model: nn.Module, x: Tensor, values: dict[str, Tensor], outputs: int) -> tuple[Tensor, Tensor]:
    """A random cotangent R [N, d2] and Jᵀ R [k], by one backward pass over all rows."""
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    with torch.enable_grad():
        f = call_with(model, leaves, x)
    R = random_cotangent((len(x), outputs), f)
    gradients = pull_back(f, list(leaves.values()), R)
    return R, torch.cat([g.to_dense().reshape(-1) for g in gradients])


def _joined(derivatives: Mapping[str, Tensor], columns: Mapping[str, slice]) -> DenseBlock:
    flat = [derivatives[name].detach().flatten(start_dim=2) for name in columns]
    return DenseBlock(torch.cat(flat, dim=-1), tuple(columns.values()))


def one_at_a_time(model: nn.Module, x: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """N·d2 plain backward passes."""
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    rows: dict[str, list[Tensor]] = {name: [] for name in values}
    for sample in x:
        with torch.enable_grad():
            f = call_with(model, leaves, sample.unsqueeze(0)).squeeze(0).unbind()
        per_output = [
            torch.autograd.grad(component, list(leaves.values()), retain_graph=True, materialize_grads=True)
            for component in f
        ]
        for name, gradients in zip(leaves, zip(*per_output, strict=True), strict=True):
            rows[name].append(torch.stack(gradients))
    return {name: torch.stack(stacked) for name, stacked in rows.items()}
