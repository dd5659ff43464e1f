"""The factored form: each layer's derivatives as the thin factors they are products of, exact and far smaller.

A block here is one way in which weights enter a network linearly: out = W(a) + b, with the layer's input `a` and the
sensitivities g = ∂f/∂out stored, never their product. `layers/` says which modules are made of which blocks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ntkfl.tangent.dense import DenseBlock
from ntkfl.tangent.gemm import products
from ntkfl.tangent.jacobian import Block, row_norms
from ntkfl.tangent.linear_product import linear_product, rowwise

Settings = tuple[int, ...]
PAIRED = 1024  # positions, on each side, of which a Gram matrix makes all pairs at a time: 4 MiB
DENSE_NUMBERS = 2**22  # numbers of a block that a Gram matrix makes dense at a time, on each side


class Call(NamedTuple):
    """One use of weights in a forward pass: the input, and ∂f/∂(the output) for each of the d2 outputs of the model."""

    input: Tensor  # [N, ...]
    sensitivity: Tensor  # [N, d2, ...]


class FactoredBlock(Block):
    """a: [N, ...], the layer's inputs; g: [N, d2, q], the sensitivities of its q numbers of output a sample.

    `weight` and `bias` are their columns; None where there is none or it is frozen. Without a weight only `densify`
    works: g summed over positions is then the smallest form. `settings` are the layer's own (a convolution's stride).
    """

    kind: ClassVar[str]
    positions: int  # at how many positions of a sample the weights are used
    groups: int = 1

    def __init__(self, a: Tensor, g: Tensor, weight: slice | None, bias: slice | None, settings: Settings = ()) -> None:
        self.a, self.g = a, g
        self.weight, self.bias = weight, bias
        self.settings = settings
        self.measure()

    @abstractmethod
    def measure(self) -> None:
        """Set `positions`, and what else follows from the factors' shapes."""

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
        """The change of the layer's outputs when its parameters change: [..., k], [..., k_b] -> [..., N, q]."""

    @abstractmethod
    def transpose(self, cotangent: Tensor) -> Tensor:
        """Its transpose in the weight, cotangent [..., N, q] -> [..., k]."""

    def pooled(self, outputs: Tensor) -> Tensor:
        """Numbers [..., q] of the layer's outputs summed over positions, [..., k_b]: the transpose in the bias."""
        return outputs.reshape(*outputs.shape[:-1], self.positions, -1).sum(dim=-2)

    @abstractmethod
    def weight_values(self) -> Tensor:
        """∂f/∂weight, dense: [N, d2, k]."""

    def bias_values(self) -> Tensor:
        """∂f/∂bias, dense: [N, d2, k_b]."""
        return self.pooled(self.g)

    def seen(self) -> Tensor:
        """What each group of the layer sees at each position, [N, groups, positions, inputs]: a layer's like W a."""
        raise NotImplementedError

    @property
    def layout(self) -> Hashable:
        """The kind, the columns, the settings and the shapes of a row."""
        spans = tuple(None if s is None else (s.start, s.stop) for s in (self.weight, self.bias))
        return (self.kind, spans, self.settings, self.a.shape[1:], self.g.shape[1:])

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.a, self.g)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Self:
        a, g = tensors
        return type(self)(a, g, self.weight, self.bias, self.settings)

    def add_jvp(self, out: Tensor, delta: Tensor) -> None:
        """g_n (the change of the outputs of sample n), for every output of the network."""
        assert self.weight is not None
        if not len(self.g):  # PyTorch's kernels differ in what they make of no rows
            return
        moved = self.apply(delta[..., self.weight], None if self.bias is None else delta[..., self.bias])
        out += rowwise(moved, self.g.mT)

    def add_vjp(self, out: Tensor, cotangent: Tensor) -> None:
        """R_n g_n is what comes back to the outputs of sample n; the transpose takes it to the weights."""
        assert self.weight is not None
        if not len(self.g):
            return
        R = rowwise(cotangent, self.g)
        out[..., self.weight] += self.transpose(R)
        if self.bias is not None:
            out[..., self.bias] += self.pooled(R).sum(dim=-2)

    def product(self, cotangent: Tensor) -> Tensor:
        """There and back without a vector [d] in between."""
        if not len(self.g):
            return torch.zeros_like(cotangent)
        R = rowwise(cotangent, self.g)
        bias = None if self.bias is None else self.pooled(R).sum(dim=-2)
        return rowwise(self.apply(self.transpose(R), bias), self.g.mT)

    def gram(self, other: Self) -> Tensor:
        """Dense rows; layers know cheaper ways."""
        return self._gram_of_dense_rows(other)

    def write_dense(self, out: Tensor) -> None:
        if self.weight is not None:
            out[..., self.weight] = self.weight_values()
        if self.bias is not None:
            out[..., self.bias] = self.bias_values()

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

    @property
    def columns(self) -> int:
        """How many weights the block has."""
        return sum(int(s.stop - s.start) for s in (self.weight, self.bias) if s is not None)

    def _gram_of_dense_rows(self, other: Self) -> Tensor:
        """N·N'·d2·k products whatever the number of positions, a few of the d2 outputs at a time.

        Outputs rather than rows are taken in turn, for then nothing is made dense twice, unless one is too large.
        """

        def part(block: Self, rows: slice, outputs: slice) -> Tensor:
            return block.with_tensors((block.a[rows], block.g[rows, outputs].contiguous())).densify().values.flatten(1)

        rows = max(1, DENSE_NUMBERS // self.columns)
        few = max(1, rows // max(len(self.g), len(other.g), 1))
        out = self.g.new_zeros(len(self.g), len(other.g))
        for i in range(0, len(self.g), rows):
            for at in range(0, self.g.shape[1], few):
                left = part(self, slice(i, i + rows), slice(at, at + few))
                for j in range(0, len(other.g), rows):
                    same = other is self and i == j
                    right = left if same else part(other, slice(j, j + rows), slice(at, at + few))
                    products(left, right, out[i : i + rows, j : j + rows])
        return out

    def _gram_of_pairs(self, other: Self, positions: int, product: Callable[[Self, Self], Tensor]) -> Tensor:
        """The Gram matrix by `product` of as many samples as have PAIRED positions; the same pair once."""
        rows = max(1, PAIRED // positions)
        mine, theirs = (
            [b.with_tensors((b.a[i : i + rows], b.g[i : i + rows])) for i in range(0, len(b.g), rows)]
            for b in (self, other)
        )
        out = self.g.new_empty(len(self.g), len(other.g))
        for i, left in enumerate(mine):
            for j, right in enumerate(theirs):
                at, to = slice(i * rows, (i + 1) * rows), slice(j * rows, (j + 1) * rows)
                if other is self and j < i:
                    out[at, to] = out[to, at].T
                else:
                    out[at, to] = product(left, left if other is self and j == i else right)
        return out

    def _pairs_are_cheaper(self, other: Self, positions: int, inputs: int, outputs: int) -> bool:
        """Whether a Gram matrix costs fewer multiplications by pairs of positions than by dense rows.

        Each pair of positions takes a product of sensitivities and one of inputs; a dense row takes a product for each
        position to make, and one for each row that it meets.
        """
        d2, N, M = self.g.shape[1], len(self.g), len(other.g)
        pairs = N * M * positions**2 * (d2 * outputs + inputs)
        return pairs <= d2 * outputs * inputs * ((N + M) * positions + N * M)


class LinearBlock(FactoredBlock):
    """`out = W a + b` used T times a sample: rows Σ_t g_t ⊗ [a_t, 1].

    a: [N, T, n_in]; g: [N, d2, T·n_out].
    """

    kind = "linear"

    def measure(self) -> None:
        self.T = self.positions = self.a.shape[1]
        self.n_in, self.n_out = self.a.shape[2], self.g.shape[2] // self.T
        self._product: Callable[[Tensor], Tensor] | None = None  # J Jᵀ, made ready at the first use

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
        lead, N = weight.shape[:-1], len(self.a)
        matrix = weight.reshape(*lead, self.n_out, self.n_in).mT
        if bias is not None and not lead:
            moved = torch.addmm(bias, self._inputs(), matrix)
        else:
            moved = self._inputs() @ matrix
            if bias is not None:
                moved += bias.unsqueeze(-2)
        return moved.reshape(*lead, N, self.T * self.n_out)

    def transpose(self, cotangent: Tensor) -> Tensor:
        """Σ_nt X_nt ⊗ a_nt."""
        lead, N = cotangent.shape[:-2], len(self.a)
        rows = cotangent.reshape(*lead, N * self.T, self.n_out)
        return (rows.mT @ self._inputs()).reshape(*lead, self.n_out * self.n_in)

    def product(self, cotangent: Tensor) -> Tensor:
        """By `linear_product` where each sample uses the layer once."""
        if self.T > 1 or not len(self.a) or self.g.requires_grad or self.a.requires_grad:
            return super().product(cotangent)
        if self._product is None:
            self._product = linear_product(self._inputs(), self.g, self.bias is not None)
        return self._product(cotangent)

    def gram(self, other: Self) -> Tensor:
        """The cheaper of pairs of positions and dense rows."""
        if self.T == 1 or self._pairs_are_cheaper(other, self.T, self.n_in, self.n_out):
            return self._gram_of_pairs(other, self.T, LinearBlock.pairs)
        return self._gram_of_dense_rows(other)

    def seen(self) -> Tensor:
        """a itself, in one group."""
        return self.a.unsqueeze(1)

    def weight_values(self) -> Tensor:
        """Σ_t g_nct ⊗ a_nt: an outer product for each output, or a matrix product over positions."""
        N, d2 = self.g.shape[:2]
        g = self.g.view(N, d2, self.T, self.n_out)
        if self.T == 1:  # an outer product needs no sum, and broadcasting no reordering
            return (g.mT * self.a.unsqueeze(1)).flatten(2)
        sums = torch.bmm(g.transpose(2, 3).reshape(N, d2 * self.n_out, self.T), self.a)
        return sums.view(N, d2, self.n_out * self.n_in)

    def pairs(self, other: Self) -> Tensor:
        """Σ_tu ⟨g_t, g'_u⟩ (⟨a_t, a'_u⟩ + 1): Gram matrices of all positions, multiplied and summed over pairs."""
        left, rows = self._sensitivities(), self._inputs()
        total = products(left, left if other is self else other._sensitivities())
        inputs = products(rows, rows if other is self else other._inputs())
        total *= inputs.add_(1) if self.bias is not None else inputs
        return total if self.T == 1 else total.view(len(self.g), self.T, len(other.g), other.T).sum((1, 3))

    def _inputs(self) -> Tensor:
        """[N·T, n_in]."""
        return self.a.reshape(-1, self.n_in)

    def _sensitivities(self) -> Tensor:
        """[N·T, d2·n_out]."""
        return self.g.view(*self.g.shape[:2], self.T, self.n_out).transpose(1, 2).reshape(len(self.g) * self.T, -1)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles carry what is stored, not what can be built from it.
        return self.__dict__ | {"_product": None}


def joined(pieces: list[Tensor], dim: int) -> Tensor:
    """One tensor; a single piece as it is, for it is copied to its place in the Jacobian anyway."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)
