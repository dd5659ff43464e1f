"""What a Jacobian can do, whatever it is stored as.

A Jacobian J ∈ R^{N×d2×d} holds ∂f_j(x_i)/∂w for N samples, d2 outputs and d weights: row i is sample i's matrix
[d2, d]. It is kept as blocks of columns, one per layer, each in the smallest exact form known for that layer
(`factored.py`, `layers/`), or dense (`dense.py`), or with few entries (`sparse.py`).

Two kernels follow from it: the full one, Θ = J Jᵀ over samples and outputs [N·d2, N·d2], and the trace kernel
H_ij = (1/d2) ⟨J_i, J_j⟩_F, [N, N], which the paper uses for every output alike.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from ntkfl.errors import ModelError, NTKFLError

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

RowIndex = int | slice | Sequence[int] | Tensor
HALF_TYPES = (torch.float16, torch.bfloat16)  # their kernels are summed in float32: a sum may leave their range


class Block(ABC):
    """Some columns of a Jacobian for all its rows. Every method is linear in the stored rows."""

    @property
    @abstractmethod
    def layout(self) -> Hashable:
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
    def write_dense(self, out: Tensor) -> None:
        """Fill this block's columns of out [N, d2, d], which is zero there."""

    @abstractmethod
    def norms(self) -> Tensor:
        """‖J_i‖_F over this block's columns, float64 [N]; see `Jacobian.norms`."""

    @abstractmethod
    def scaled(self, factors: Tensor) -> Self:
        """Row i times factors[i]."""


class Jacobian(ABC):
    """Rows are samples. `shape` is (N, d2, d), columns in `named_parameters()` order of the trainable parameters."""

    shape: tuple[int, int, int]

    @abstractmethod
    def jvp(self, delta: Tensor) -> Tensor:
        """J δ, the change of the linearised outputs: [..., d] -> [..., N, d2].

        Costs about a forward pass for every leading direction; no more memory than the result and a layer's outputs.
        """

    @abstractmethod
    def vjp(self, cotangent: Tensor) -> Tensor:
        """Jᵀ R summed over samples and outputs: [..., N, d2] -> [..., d]. Costs what `jvp` does."""

    def __matmul__(self, delta: Tensor) -> Tensor:
        """J @ δ is `jvp`."""
        return self.jvp(delta)

    def product(self, cotangent: Tensor) -> Tensor:
        """Θ R = J Jᵀ R with the full kernel, which is never made: [N, d2] -> [N, d2]. Costs a `vjp` and a `jvp`."""
        return self.jvp(self.vjp(cotangent))

    @abstractmethod
    def gram(self, other: Jacobian) -> Tensor:
        """(1/d2)⟨J_i, J'_j⟩_F against another Jacobian of the same network: [N, N'].

        A layer of n_in inputs and n_out outputs used once per sample costs N·N'·(d2·n_out + n_in) multiplications,
        where its derivatives would take N·N'·d2·n_out·n_in.
        """

    @abstractmethod
    def dense(self) -> Tensor:
        """The whole tensor [N, d2, d]; N·d2·d numbers, so only for small cases."""

    @abstractmethod
    def __getitem__(self, index: RowIndex) -> Jacobian:
        """The rows at `index` (an int keeps its dimension); a plain slice shares memory with this Jacobian."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything stored."""

    def kernel(self) -> Tensor:
        """The trace kernel H_ij = (1/d2)⟨J_i, J_j⟩_F, [N, N], exactly symmetric; N² memory.

        Computed by blocks of the upper triangle: half the products, and blocks that stay in a CPU's cache.
        """
        if self.dtype in HALF_TYPES:
            return self.to(torch.float32).kernel().to(self.dtype)
        H = torch.empty(len(self), len(self), dtype=self.dtype, device=self.device)
        size = 512 if self.device.type == "cpu" else 8192
        at = [slice(i, min(i + size, len(self))) for i in range(0, len(self), size)]
        parts = [self[rows] for rows in at]
        for i, left in enumerate(parts):
            for j, right in enumerate(parts[i:], start=i):
                block = left.gram(right)
                H[at[i], at[j]] = (block + block.T) / 2 if i == j else block
                if i != j:
                    H[at[j], at[i]] = block.T
        return H

    @abstractmethod
    def norms(self) -> Tensor:
        """‖J_i‖_F of each sample's [d2, d] matrix, float64 [N].

        Exact for dense, sparse and linear layers; where a layer is used at several positions of a sample it is the
        bound ‖g‖ ‖[a, 1]‖, or that up to a factor which is the same for all rows (a convolution's overlaps).
        """

    @abstractmethod
    def scaled(self, factors: Tensor) -> Jacobian:
        """Row i times factors[i], for factors [N]. Costs a copy of the sensitivities, or of all derivatives."""

    @abstractmethod
    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with every stored tensor changed."""

    def to(self, *target: Any) -> Self:
        """The same on a device, in a floating type, or both, as `Tensor.to` takes them: J.to("cuda", torch.float64)."""

        def moved(t: Tensor) -> Tensor:
            found = t.to(*target)
            if not found.is_floating_point() and t.is_floating_point():
                raise ModelError(f"derivatives have a floating type, not {found.dtype}")
            return found if t.is_floating_point() else t.to(found.device)  # tokens and positions stay integers

        return self.mapped(moved)

    def double(self) -> Self:
        """The same in float64."""
        return self.to(torch.float64)

    def to_scipy(self) -> LinearOperator:
        """J as a `scipy.sparse.linalg.LinearOperator` [N·d2, d], row i·d2 + j the output j of sample i.

        For SciPy's solvers (`lsmr`, `svds`, `eigsh` of J Jᵀ): products are `jvp` and `vjp`, several vectors at once in
        `matmat`. Nothing is made dense, but vectors are copied to this Jacobian's device and back. Needs SciPy.
        """
        import numpy as np
        from scipy.sparse.linalg import LinearOperator

        if self.dtype in HALF_TYPES:  # NumPy does not have both
            return self.to(torch.float32).to_scipy()
        N, d2, d = self.shape

        def tensor(columns: Any) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(columns.T)).to(self.device, self.dtype)

        def forth(columns: Any) -> Any:  # [d, k] or [d] -> [N·d2, k] or [N·d2]
            return self.jvp(tensor(columns)).flatten(-2).detach().cpu().numpy().T

        def back(columns: Any) -> Any:  # [N·d2, k] or [N·d2] -> [d, k] or [d]
            rows = tensor(columns)
            return self.vjp(rows.view(*rows.shape[:-1], N, d2)).detach().cpu().numpy().T

        dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
        return LinearOperator((N * d2, d), forth, back, forth, dtype, back)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the derivatives."""
        return next(t.dtype for t in self.tensors() if t.is_floating_point())  # tokens and positions are integers

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.tensors()[0].device

    @property
    def nbytes(self) -> int:
        """Bytes held by the stored form."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        N, d2, d = self.shape
        return f"{type(self).__name__}(N={N}, d2={d2}, d={d}, {self.nbytes / 2**20:.1f} MiB, {self.dtype})"

    def _check(self, what: str, tensor: Tensor, tail: tuple[int, ...]) -> Tensor:
        """The tensor in this Jacobian's type; `ModelError` unless its shape ends in `tail`."""
        if not isinstance(tensor, Tensor):
            raise ModelError(f"{what} must be a tensor, got an object of type {type(tensor).__name__}")
        if tuple(tensor.shape[tensor.ndim - len(tail) :]) != tail:
            raise ModelError(f"{what} must end in shape {list(tail)}, got {list(tensor.shape)}")
        return tensor.to(device=self.device, dtype=self.dtype)


class BlockJacobian(Jacobian):
    """One form for all rows: blocks of columns. Columns that no block covers are zero (an unused parameter)."""

    def __init__(self, blocks: Sequence[Block], outputs: int, columns: int) -> None:
        if not blocks:
            raise ModelError("the model's output depends on none of its trainable parameters")
        self.blocks = tuple(blocks)
        self.shape = (self.blocks[0].tensors()[0].shape[0], outputs, columns)

    @property
    def layout(self) -> Hashable:
        """The shape of a row, and the form of each block."""
        return (self.shape[1:], tuple(block.layout for block in self.blocks))

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for block in self.blocks for t in block.tensors())

    def jvp(self, delta: Tensor) -> Tensor:
        """J δ = Σ_b J_b δ_b over the blocks."""
        N, d2, d = self.shape
        delta = self._check("delta", delta, (d,))
        out = delta.new_zeros((*delta.shape[:-1], N, d2))
        for block in self.blocks:
            block.add_jvp(out, delta)
        return out

    def vjp(self, cotangent: Tensor) -> Tensor:
        """Each block writes its own columns."""
        N, d2, d = self.shape
        cotangent = self._check("the cotangent", cotangent, (N, d2))
        out = cotangent.new_zeros((*cotangent.shape[:-2], d))
        for block in self.blocks:
            block.add_vjp(out, cotangent)
        return out

    def gram(self, other: Jacobian) -> Tensor:
        """The sum of the blocks' own; through dense rows where the forms differ."""
        check_same_network([self, other])
        if not isinstance(other, BlockJacobian):
            return other.gram(self).T
        if self.dtype in HALF_TYPES:
            wide = self.to(torch.float32)
            return wide.gram(wide if other is self else other.to(torch.float32)).to(self.dtype)
        if self.layout != other.layout:
            return _dense_gram(self, other)
        total = self.blocks[0].gram(other.blocks[0])
        for mine, theirs in zip(self.blocks[1:], other.blocks[1:], strict=True):
            total += mine.gram(theirs)
        return total.div_(self.shape[1])

    def dense(self) -> Tensor:
        out = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for block in self.blocks:
            block.write_dense(out)
        return out

    def norms(self) -> Tensor:
        """The root of the sum of squares over blocks."""
        return torch.stack([block.norms() for block in self.blocks]).square().sum(0).sqrt()

    def scaled(self, factors: Tensor) -> BlockJacobian:
        factors = self._check("factors", factors, self.shape[:1])
        return BlockJacobian([block.scaled(factors) for block in self.blocks], *self.shape[1:])

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        blocks = [block.with_tensors(tuple(change(t) for t in block.tensors())) for block in self.blocks]
        return type(self)(blocks, *self.shape[1:])

    def __getitem__(self, index: RowIndex) -> BlockJacobian:
        plain = isinstance(index, slice) and index.step in (None, 1)
        rows = index if plain else row_index(index, len(self), self.device)
        return self.mapped(lambda t: t[rows])


def check_jacobian(J: object) -> None:
    """`ModelError` for what is no Jacobian."""
    if not isinstance(J, Jacobian):
        kind = "a tensor" if isinstance(J, Tensor) else f"an object of type {type(J).__name__}"
        raise ModelError(f"J must be a Jacobian of ntkfl.jacobian, got {kind}")


def check_same_network(jacobians: Sequence[Jacobian]) -> None:
    """`ModelError` unless all have the same outputs, weights, type and device."""
    for J in jacobians:
        check_jacobian(J)
        first = jacobians[0]
        if J.shape[1:] != first.shape[1:]:
            raise ModelError(
                f"Jacobians of different networks: {first.shape[1]} outputs and {first.shape[2]} weights "
                f"against {J.shape[1]} and {J.shape[2]}"
            )
        if (J.dtype, J.device) != (first.dtype, first.device):
            raise ModelError(
                f"Jacobians of different kinds: {first.dtype} on {first.device}, {J.dtype} on {J.device}; move one"
            )


def row_norms(rows: Tensor) -> Tensor:
    """2-norm of each of rows [N, ...], float64 [N]: squares of large float32 numbers do not overflow."""
    norms: Tensor = rows.flatten(1).norm(dim=1, dtype=torch.float64)
    return norms


def row_index(index: RowIndex, length: int, device: torch.device) -> Tensor:
    """Row numbers [n] that an index of rows means."""
    # Of a tensor [N, d2, d], J[0, 1] would be one output's derivatives; as a list of rows it would be taken in silence.
    if isinstance(index, tuple | EllipsisType | None):
        raise ModelError(f"a Jacobian is indexed by rows only: use J[[0, 1]], or J.dense()[...]; got {index!r}")
    if not isinstance(index, slice | Tensor):
        index = torch.as_tensor(index, dtype=None if isinstance(index, int) or len(index) else torch.int64)
    rows = torch.arange(length)[index.cpu() if isinstance(index, Tensor) else index]
    return rows.reshape(-1).to(device)


def concatenate(jacobians: Sequence[Jacobian]) -> Jacobian:
    """Rows of several Jacobians of one network, in order: [N_1, d2, d], [N_2, d2, d] … -> [Σ N_i, d2, d].

    Forms may differ. Consecutive ones of one layout are copied into one form, so that their products are one product.
    """
    if not jacobians:
        raise NTKFLError("nothing to concatenate: the list of Jacobians is empty")
    check_same_network(jacobians)
    parts: list[BlockJacobian] = []
    for J in jacobians:
        assert isinstance(J, StackedJacobian | BlockJacobian)
        parts += J.parts if isinstance(J, StackedJacobian) else [J]
    joined: list[BlockJacobian] = []
    for _, run in itertools.groupby(parts, key=lambda part: part.layout):
        same = list(run)
        tensors = iter([torch.cat(own) for own in zip(*(part.tensors() for part in same), strict=True)])
        joined.append(same[0].mapped(lambda _, made=tensors: next(made)) if same[1:] else same[0])  # type: ignore[misc]
    return joined[0] if len(joined) == 1 else StackedJacobian(joined)


class StackedJacobian(Jacobian):
    """Rows in parts of several forms, one after the other."""

    def __init__(self, parts: Sequence[BlockJacobian]) -> None:
        self.parts = tuple(parts)
        self.shape = (sum(len(part) for part in parts), *parts[0].shape[1:])

    def _split(self, rows: Tensor, dim: int = 0) -> Iterator[tuple[BlockJacobian, Tensor]]:
        """Each part with its own of the rows that lie along a dimension."""
        return zip(self.parts, torch.split(rows, [len(part) for part in self.parts], dim), strict=True)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for part in self.parts for t in part.tensors())

    def jvp(self, delta: Tensor) -> Tensor:
        return torch.cat([part.jvp(delta) for part in self.parts], dim=-2)

    def vjp(self, cotangent: Tensor) -> Tensor:
        """The sum over parts of each one's own rows."""
        cotangent = self._check("the cotangent", cotangent, self.shape[:2])
        return torch.stack([part.vjp(R) for part, R in self._split(cotangent, -2)]).sum(0)

    def gram(self, other: Jacobian) -> Tensor:
        """Part by part; each meets the other as it is."""
        return torch.cat([part.gram(other) for part in self.parts])

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts])

    def norms(self) -> Tensor:
        return torch.cat([part.norms() for part in self.parts])

    def scaled(self, factors: Tensor) -> StackedJacobian:
        factors = self._check("factors", factors, self.shape[:1])
        return StackedJacobian([part.scaled(own) for part, own in self._split(factors)])

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)([part.mapped(change) for part in self.parts])

    def __getitem__(self, index: RowIndex) -> Jacobian:
        """Consecutive rows of one part travel together, so that order is kept with few pieces."""
        rows = row_index(index, len(self), torch.device("cpu"))
        ends = torch.tensor([len(part) for part in self.parts]).cumsum(0)
        which, lengths = torch.unique_consecutive(torch.searchsorted(ends, rows, right=True), return_counts=True)
        pieces = [
            self.parts[part][own - int(ends[part]) + len(self.parts[part])]
            for part, own in zip(which.tolist(), torch.split(rows, lengths.tolist()), strict=True)
        ]
        return concatenate(pieces) if pieces else self.parts[0][:0]


def _dense_gram(left: BlockJacobian, right: BlockJacobian, budget: int = 2**26) -> Tensor:
    """Gram matrix across unlike forms, a few dense rows at a time (about `budget` numbers for each side)."""
    d2, d = left.shape[1:]
    rows = max(1, budget // (d2 * d))
    out = torch.empty(len(left), len(right), dtype=left.dtype, device=left.device)
    for i in range(0, len(left), rows):
        a = left[i : i + rows].dense().flatten(1)
        for j in range(0, len(right), rows):
            out[i : i + rows, j : j + rows] = a @ right[j : j + rows].dense().flatten(1).T
    return out.div_(d2)
