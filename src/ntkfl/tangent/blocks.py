"""The forms in which some columns of a Jacobian are stored: every derivative (dense), or the thin factors that a
layer's derivatives are products of (factored), exact and far smaller.

A factored block is one way in which weights enter a network linearly: out = W(a) + b, with the layer's input `a` and
the sensitivities g = ∂f/∂out stored, never their product. `layers/` says which modules are made of which blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

Settings = tuple[int, ...]
Tensors = list[Tensor] | tuple[Tensor, ...]
Factors = tuple[Tensor, Tensor, Settings]
# The kind of block, first and last-plus-one column of each of its pieces, and what else must agree.
Layout = tuple[str, tuple[tuple[int, int], ...], Any]

PAIRED = 1024  # positions, on each side, of which a Gram matrix makes all pairs at a time: 4 MiB
DENSE_NUMBERS = 2**22  # numbers of a block that a Gram matrix makes dense at a time, on each side
_STRIP = 64  # rows of a symmetric matrix at a time, on a CPU
_CPUINFO = Path("/proc/cpuinfo")


class Block(ABC):
    """Some columns of a Jacobian for all its N rows, linear in the last of the stored tensors."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Equal layouts mean equal columns in an equal form: such blocks concatenate and multiply factor by factor."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What is stored; the first dimension of each is the row."""

    @abstractmethod
    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Self:
        """The same columns over other rows."""

    @abstractmethod
    def add_jvp(self, out: Tensor, delta: Tensor) -> None:
        """out [..., N, d2] += J_block delta, with delta [..., d] the whole weight change."""

    @abstractmethod
    def add_vjp(self, out: Tensor, cotangent: Tensor) -> None:
        """out [..., d] += J_blockᵀ cotangent, with cotangent [..., N, d2]."""

    @abstractmethod
    def gram(self, other: Self) -> Tensor:
        """⟨J_i, J'_j⟩_F over this block's columns, [N, N'], for an `other` of the same layout."""

    @abstractmethod
    def densify(self) -> DenseBlock:
        """The same columns, every derivative stored: N·d2·k numbers for k columns."""

    def norms(self) -> Tensor:
        """‖J_i‖_F over this block's columns, float64 [N]; see `Jacobian.norms`."""
        return row_norms(self.tensors()[-1])

    def scaled(self, factors: Tensor) -> Self:
        """Row i times factors[i]."""
        *others, rows = self.tensors()
        return self.with_tensors((*others, rows * factors.view(-1, *[1] * (rows.ndim - 1))))


class DenseBlock(Block):
    """values [N, d2, k] for the k columns listed by `columns`, in order: the reference for all other forms."""

    def __init__(self, values: Tensor, columns: tuple[slice, ...]) -> None:
        self.values = values
        self.columns = columns

    @property
    def layout(self) -> Layout:
        return ("dense", spans(self.columns), None)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Self:
        return type(self)(tensors[0], self.columns)

    def add_jvp(self, out: Tensor, delta: Tensor) -> None:
        """Values [N·d2, k] times the δ of these columns."""
        picked = torch.cat([delta[..., s] for s in self.columns], dim=-1)
        out += (picked @ self.values.flatten(0, 1).T).view(out.shape)

    def add_vjp(self, out: Tensor, cotangent: Tensor) -> None:
        """The transpose: R as one row [N·d2]."""
        self.scatter(out, cotangent.flatten(-2) @ self.values.flatten(0, 1))

    def scatter(self, out: Tensor, values: Tensor) -> None:
        """out [..., d] += values [..., k] at this block's columns."""
        widths = [s.stop - s.start for s in self.columns]
        for span, part in zip(self.columns, torch.split(values, widths, -1), strict=True):
            out[..., span] += part

    def gram(self, other: Self) -> Tensor:
        """Inner products of rows [d2·k]: N·N'·d2·k operations."""
        rows = self.values.flatten(1)
        return row_products(rows, rows if other is self else other.values.flatten(1))

    def densify(self) -> DenseBlock:
        return self


class FactoredBlock(Block):
    """a: [N, ...], the layer's inputs; g: [N, d2, T·n_out], sensitivities of its outputs at T positions of a sample.

    Rows are Σ_t g_t ⊗ [seen_t, 1], where `seen` are a layer's inputs at each position. `weight` and `bias` are their
    columns; None if it is absent or frozen. Without a weight only `densify` works: g summed over positions
    is then the smallest form. `settings` are the layer's own (a convolution's stride).
    """

    kind: ClassVar[str]
    groups: int = 1  # parts of the outputs, each of which sees a part of the inputs

    def __init__(self, a: Tensor, g: Tensor, weight: slice | None, bias: slice | None, settings: Settings = ()) -> None:
        self.a, self.g = a, g
        self.weight, self.bias = weight, bias
        self.settings = settings
        self.positions = self.count_positions()  # T
        self.n_out = g.shape[2] // self.positions

    def count_positions(self) -> int:
        """At how many positions of a sample the weights are used."""
        return self.a.shape[1]

    @classmethod
    @abstractmethod
    def factors(cls, inputs: Tensors, sensitivities: Tensors, settings: Settings) -> Factors | None:
        """a and g of all uses of the weights together, and the block's settings, from each one's input [N, ...] and
        ∂f/∂(its output) [N, d2, ...]; None where they have no factors in common.
        """

    @classmethod
    @abstractmethod
    def fits(cls, a: Tensor, g: Tensor, weight: int, bias: int | None, settings: Settings) -> bool:
        """Whether tensors from a stranger are factors of `weight` and `bias` (None: none) many columns."""

    @classmethod
    def admits(cls, sample_dim: int, ndim: int, settings: Settings) -> bool:
        """Whether samples may lie along this dimension of the layer's input of `ndim` dimensions."""
        return sample_dim < ndim - 1

    @abstractmethod
    def apply(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The change of the layer's outputs when its parameters change: [..., k], [..., k_b] -> [..., N, T·n_out]."""

    @abstractmethod
    def transpose(self, cotangent: Tensor) -> Tensor:
        """Its transpose in the weight, cotangent [..., N, T·n_out] -> [..., k]."""

    def seen(self) -> Tensor:
        """What each group of the layer sees at each position, [N, groups, T, inputs]."""
        raise NotImplementedError

    def weight_values(self) -> Tensor:
        """∂f/∂weight, dense: Σ_t g_nct ⊗ seen_nt, a matrix product for each sample and group: [N, d2, k]."""
        N, d2, G = *self.g.shape[:2], self.groups
        g = self.by_output(self.g).reshape(N, d2, G, -1, self.positions).transpose(1, 2)
        total = torch.bmm(g.reshape(N * G, -1, self.positions), self.seen().flatten(0, 1))
        return total.view(N, G, d2, -1).transpose(1, 2).reshape(N, d2, -1)

    def pooled(self, outputs: Tensor) -> Tensor:
        """The layer's outputs [..., T·n_out] summed over positions, [..., n_out]: the transpose in the bias, and of g
        ∂f/∂bias, dense.
        """
        return self.by_output(outputs).sum(dim=-1)

    def by_output(self, numbers: Tensor) -> Tensor:
        """Numbers [..., T·n_out] of the layer's outputs, or those of a sensitivity, as [..., n_out, T]."""
        return numbers.reshape(*numbers.shape[:-1], self.positions, self.n_out).mT

    @property
    def columns(self) -> tuple[slice, ...]:
        """Of the weight, then of the bias, as far as they train."""
        return tuple(s for s in (self.weight, self.bias) if s is not None)

    @property
    def width(self) -> int:
        """How many columns there are."""
        return sum(s.stop - s.start for s in self.columns)

    @property
    def layout(self) -> Layout:
        return (self.kind, spans(self.columns), (self.settings, self.a.shape[1:], self.g.shape[1:]))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.a, self.g)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Self:
        a, g = tensors
        return type(self)(a, g, self.weight, self.bias, self.settings)

    def add_jvp(self, out: Tensor, delta: Tensor) -> None:
        """g_n (the change of the outputs of sample n), for every output of the network."""
        if len(self.g):  # PyTorch's kernels differ in what they make of no rows
            moved = self.apply(delta[..., self.weight], None if self.bias is None else delta[..., self.bias])
            out += rowwise(moved, self.g.mT)

    def add_vjp(self, out: Tensor, cotangent: Tensor) -> None:
        """R_n g_n is what comes back to the outputs of sample n; the transpose takes it to the weights."""
        if len(self.g):
            R = rowwise(cotangent, self.g)
            out[..., self.weight] += self.transpose(R)
            if self.bias is not None:
                out[..., self.bias] += self.pooled(R).sum(dim=-2)

    def norms(self) -> Tensor:
        """‖g‖ ‖[a, 1]‖."""
        squares = row_norms(self.a).square() if self.a.is_floating_point() else self.a.shape[1]  # tokens: ones
        return row_norms(self.g) * (squares + torch.tensor(float(self.bias is not None))).sqrt()

    def densify(self) -> DenseBlock:
        values = [] if self.weight is None else [self.weight_values()]
        values += [] if self.bias is None else [self.pooled(self.g)]
        return DenseBlock(joined(values, dim=-1), self.columns)

    def gram(self, other: Self) -> Tensor:
        """By pairs of positions, a product of sensitivities and one of inputs each, or by dense rows: the cheaper."""
        d2, inputs = self.g.shape[1], self.width // self.n_out
        pairs = self.positions * other.positions * (d2 * self.n_out + inputs)
        if self.groups == 1 and (self.positions == 1 or pairs <= d2 * self.n_out * inputs):
            return self._gram_of_pairs(other)
        return self._gram_of_dense_rows(other)

    def _gram_of_pairs(self, other: Self) -> Tensor:
        """Σ_tu ⟨g_t, g'_u⟩ (⟨seen_t, seen'_u⟩ + 1), of as many samples at a time as have PAIRED positions."""
        rows = max(1, PAIRED // self.positions)
        mine = [self._rows(slice(i, i + rows)) for i in range(0, len(self.g), rows)]
        theirs = mine if other is self else [other._rows(slice(i, i + rows)) for i in range(0, len(other.g), rows)]
        out = self.g.new_empty(len(self.g), len(other.g))
        for i, left in enumerate(mine):
            for j, right in enumerate(theirs):
                g = left._at_positions()
                total = row_products(g, g if right is left else right._at_positions())
                met = left.meet(right)
                total *= met + 1 if self.bias is not None else met
                shape = (len(left.g), self.positions, len(right.g), self.positions)
                out[i * rows :, j * rows :][: shape[0], : shape[2]] = total.view(shape).sum((1, 3))
        return out

    def _gram_of_dense_rows(self, other: Self) -> Tensor:
        """N·N'·d2·k products whatever the number of positions, a few of the d2 outputs at a time.

        Outputs rather than rows are taken in turn, for then nothing is made dense twice, unless one is too large.
        """

        def dense(block: Self, start: int, output: int) -> Tensor:
            return block._rows(slice(start, start + rows), slice(output, output + few)).densify().values.flatten(1)

        rows = max(1, DENSE_NUMBERS // self.width)
        few = max(1, rows // max(len(self.g), len(other.g), 1))
        out = self.g.new_zeros(len(self.g), len(other.g))
        for i in range(0, len(self.g), rows):
            for output in range(0, self.g.shape[1], few):
                left = dense(self, i, output)
                for j in range(0, len(other.g), rows):
                    right = left if other is self and i == j else dense(other, j, output)
                    out[i : i + rows, j : j + rows] += row_products(left, right)
        return out

    def meet(self, other: Self) -> Tensor:
        """⟨seen_t, seen'_u⟩ of all pairs of positions, [N·T, N'·T]; without groups."""
        mine = self.seen().flatten(0, 2)
        return row_products(mine, mine if other is self else other.seen().flatten(0, 2))

    def _rows(self, rows: slice, outputs: slice = slice(None)) -> Self:
        return self.with_tensors((self.a[rows], self.g[rows, outputs].contiguous()))

    def _at_positions(self) -> Tensor:
        """g as [N·T, d2·n_out]."""
        return self.by_output(self.g).permute(0, 3, 1, 2).flatten(2).flatten(0, 1)


# -- What a layer writes down while it runs ----------------------------------------------------------------------------


class Use(NamedTuple):
    """In which module and block, and through which trained parameters (by their names in the model), weights enter."""

    module: str
    block: type[FactoredBlock]
    weight: str | None
    bias: str | None
    settings: Settings

    @property
    def names(self) -> set[str]:
        """Of the parameters."""
        return {name for name in (self.weight, self.bias) if name is not None}


Uses = dict[Use, list[tuple[Tensor, Tensor]]]  # in one forward pass, each with the (input, output) of its calls


@dataclass(frozen=True)
class Tape:
    """Given to the `run` of a layer, named `module`. It holds parameters fixed, so that autograd sees only the way
    through the layer's input, and notes `uses` of those that train, whose `names` it knows by their `id`. With `live`
    they stay part of the graph, for derivatives of derivatives. Without names it lets the layer run as it is, in
    operations that always differentiate.
    """

    module: str = ""
    names: Mapping[int, str] = field(default_factory=dict)
    uses: Uses = field(default_factory=dict)
    live: bool = True

    def values(self, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Parameters as this layer computes with them."""
        if self.live:
            return weight, bias
        return weight.detach(), None if bias is None else bias.detach()

    def tap(
        self,
        block: type[FactoredBlock],
        input: Tensor,
        output: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        settings: Settings = (),
    ) -> Tensor:
        """Note that `output` came from `input` through these parameters; the layer goes on with what is returned."""
        use = Use(self.module, block, self.names.get(id(weight)), self.names.get(id(bias)), settings)
        if not use.names:
            return output
        if not output.requires_grad:
            output.requires_grad_()
        self.uses.setdefault(use, []).append((input, output))
        return output.clone()  # an in-place activation behind the layer must not overwrite the tapped output


# -- Products that everything is made of -------------------------------------------------------------------------------
# PyTorch multiplies float32 matrices by Intel's MKL, which takes AVX2 on AMD's processors also where they have AVX-512.
# oneDNN, which PyTorch has for convolutions, takes what there is: half the time of a kernel or a flow. Which of the two
# is called depends on the machine alone, so that a computation repeats to the bit.


@cache
def by_onednn() -> bool:
    """Whether float32 products on this machine's CPU are oneDNN's: an AMD with AVX-512, under Linux."""
    known = torch.backends.cpu.get_cpu_capability() == "AVX512" and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return known and _CPUINFO.exists() and "AuthenticAMD" in _CPUINFO.read_text()


def times_transposed(a: Tensor, b: Tensor, row: Tensor | None = None) -> Tensor:
    """a bᵀ, plus `row` in every row: [M, K], [N, K] and [N] -> [M, N]."""
    single = a.dtype == torch.float32 and a.device.type == "cpu" and a.numel() and b.numel()
    tracked = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)  # oneDNN's product has no derivative
    if single and not tracked and by_onednn():
        found: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, row, "none", [], "")
        return found
    return a @ b.mT if row is None else torch.addmm(row, a, b.mT)


def row_products(left: Tensor, right: Tensor) -> Tensor:
    """left rightᵀ, [N, k] and [N', k] -> [N, N']. Of one tensor with itself only the upper half is computed."""
    if left is not right or left.device.type != "cpu":
        return times_transposed(left, right)
    out = left.new_empty(len(left), len(left))
    for at in range(0, len(left), _STRIP):
        strip = times_transposed(left[at : at + _STRIP], left[at:])
        out[at : at + _STRIP, at:], out[at:, at : at + _STRIP] = strip, strip.T
    return out


def rowwise(vectors: Tensor, matrices: Tensor) -> Tensor:
    """A matrix for each row: [..., N, p] and [N, p, q] -> [..., N, q]."""
    if vectors.ndim == 2:  # as rows: three times as fast on a CPU as the same with columns
        return torch.bmm(vectors.unsqueeze(1), matrices).squeeze(1)
    return torch.einsum("...np,npq->...nq", vectors, matrices)


def row_norms(rows: Tensor) -> Tensor:
    """2-norm of each of rows [N, ...], float64 [N]: squares of large float32 numbers do not overflow."""
    norms: Tensor = rows.flatten(1).norm(dim=1, dtype=torch.float64)
    return norms


def joined(pieces: Tensors, dim: int) -> Tensor:
    """One tensor; a single piece as it is, for it is copied to its place in the Jacobian anyway."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)


def spans(columns: Sequence[slice]) -> tuple[tuple[int, int], ...]:
    """First and last-plus-one column of each slice, which Python 3.11 cannot hash."""
    return tuple((s.start, s.stop) for s in columns)
