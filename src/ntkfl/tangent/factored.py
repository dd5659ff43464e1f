"""The factored form: each layer's derivatives as the thin factors they are products of, exact and far smaller.

A block here is one way in which weights enter a network linearly: out = W(a) + b, with the layer's input `a` and the
sensitivities g = ∂f/∂out stored, never their product. `layers/` says which modules are made of which blocks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ntkfl.tangent.dense import DenseBlock
from ntkfl.tangent.jacobian import Block, row_norms
from ntkfl.tangent.products import row_products, rowwise, times_transposed

Settings = tuple[int, ...]
PAIRED = 1024  # positions, on each side, of which a Gram matrix makes all pairs at a time: 4 MiB
DENSE_NUMBERS = 2**22  # numbers of a block that a Gram matrix makes dense at a time, on each side


class Call(NamedTuple):
    """One use of weights in a forward pass: the input, and ∂f/∂(the output) for each of the d2 outputs of the model."""

    input: Tensor  # [N, ...]
    sensitivity: Tensor  # [N, d2, ...]


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
    def factors(cls, calls: Sequence[Call], settings: Settings) -> tuple[Tensor, Tensor, Settings] | None:
        """a and g of all calls together, and the block's settings; None where the calls have no factors in common."""

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

    def bias_values(self) -> Tensor:
        """∂f/∂bias, dense: [N, d2, k_b]."""
        return self.pooled(self.g)

    def pooled(self, outputs: Tensor) -> Tensor:
        """The layer's outputs [..., T·n_out] summed over positions, [..., n_out]: the transpose in the bias."""
        return self.by_output(outputs).sum(dim=-1)

    def by_output(self, numbers: Tensor) -> Tensor:
        """Numbers [..., T·n_out] of the layer's outputs, or those of a sensitivity, as [..., n_out, T]."""
        return numbers.reshape(*numbers.shape[:-1], self.positions, self.n_out).mT

    @property
    def layout(self) -> Hashable:
        """The kind, the columns, the settings and the shapes of a row."""
        spans = tuple(None if s is None else (s.start, s.stop) for s in (self.weight, self.bias))
        return (self.kind, spans, self.settings, self.a.shape[1:], self.g.shape[1:])

    @property
    def columns(self) -> int:
        """How many weights the block has."""
        return sum(int(s.stop - s.start) for s in (self.weight, self.bias) if s is not None)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.a, self.g)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Self:
        a, g = tensors
        return type(self)(a, g, self.weight, self.bias, self.settings)

    def add_jvp(self, out: Tensor, delta: Tensor) -> None:
        """g_n (the change of the outputs of sample n), for every output of the network."""
        assert self.weight is not None
        if len(self.g):  # PyTorch's kernels differ in what they make of no rows
            moved = self.apply(delta[..., self.weight], None if self.bias is None else delta[..., self.bias])
            out += rowwise(moved, self.g.mT)

    def add_vjp(self, out: Tensor, cotangent: Tensor) -> None:
        """R_n g_n is what comes back to the outputs of sample n; the transpose takes it to the weights."""
        assert self.weight is not None
        if len(self.g):
            R = rowwise(cotangent, self.g)
            out[..., self.weight] += self.transpose(R)
            if self.bias is not None:
                out[..., self.bias] += self.pooled(R).sum(dim=-2)

    def write_dense(self, out: Tensor) -> None:
        self.densify().write_dense(out)

    def norms(self) -> Tensor:
        """‖g‖ ‖[a, 1]‖."""
        squares = row_norms(self.a).square() if self.a.is_floating_point() else self.a.shape[1]  # tokens: ones
        return row_norms(self.g) * (squares + torch.tensor(float(self.bias is not None))).sqrt()

    def scaled(self, factors: Tensor) -> Self:
        """Scales g alone, for rows are linear in it."""
        return self.with_tensors((self.a, self.g * factors[:, None, None]))

    def densify(self) -> DenseBlock:
        """The same columns, every derivative stored: N·d2·(k + k_b) numbers."""
        parts = ([] if self.weight is None else [(self.weight_values(), self.weight)]) + (
            [] if self.bias is None else [(self.bias_values(), self.bias)]
        )
        values = [part for part, _ in parts]
        return DenseBlock(values[0] if len(values) == 1 else torch.cat(values, dim=-1), tuple(s for _, s in parts))

    def gram(self, other: Self) -> Tensor:
        """By pairs of positions, a product of sensitivities and one of inputs each, or by dense rows: the cheaper."""
        d2, inputs = self.g.shape[1], self.columns // self.n_out
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

        rows = max(1, DENSE_NUMBERS // self.columns)
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


class LinearBlock(FactoredBlock):
    """`out = W a + b` used T times a sample: rows Σ_t g_t ⊗ [a_t, 1].

    a: [N, T, n_in]; g: [N, d2, T·n_out]; W: [n_out, n_in].
    """

    kind = "linear"

    @classmethod
    def factors(cls, calls: Sequence[Call], settings: Settings) -> tuple[Tensor, Tensor, Settings]:
        a = joined([c.input.reshape(len(c.input), -1, c.input.shape[-1]) for c in calls], dim=1)
        return a, joined([c.sensitivity.flatten(start_dim=2) for c in calls], dim=2), ()

    @classmethod
    def fits(cls, a: Tensor, g: Tensor, weight: int, bias: int | None, settings: Settings) -> bool:
        if a.ndim != 3 or not a.is_floating_point() or settings or not a.shape[1] or g.shape[2] % a.shape[1]:
            return False
        n_out = g.shape[2] // a.shape[1]
        return weight == n_out * a.shape[2] and bias in (None, n_out)

    def apply(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """δW a_t + δb at every position."""
        lead, inputs = weight.shape[:-1], self.a.flatten(0, 1)
        matrix = weight.reshape(*lead, self.n_out, -1)
        if lead:
            moved = inputs @ matrix.mT
            moved = moved if bias is None else moved + bias.unsqueeze(-2)
        else:
            moved = times_transposed(inputs, matrix, bias)
        return moved.reshape(*lead, len(self.a), -1)

    def transpose(self, cotangent: Tensor) -> Tensor:
        """Σ_nt X_nt ⊗ a_nt."""
        lead, inputs = cotangent.shape[:-2], self.a.flatten(0, 1)
        rows = cotangent.reshape(*lead, -1, self.n_out).mT
        return (rows @ inputs if lead else times_transposed(rows, inputs.mT)).reshape(*lead, -1)

    def seen(self) -> Tensor:
        """a itself, in one group."""
        return self.a.unsqueeze(1)

    def weight_values(self) -> Tensor:
        """Outer products where the layer is used once: they need no sum, and broadcasting no reordering."""
        return (
            (self.g.unsqueeze(3) * self.a.unsqueeze(1)).flatten(2) if self.positions == 1 else super().weight_values()
        )


def joined(pieces: list[Tensor], dim: int) -> Tensor:
    """One tensor; a single piece as it is, for it is copied to its place in the Jacobian anyway."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)
