"""What a Jacobian can do, whatever it is stored as.

A Jacobian J ∈ R^{N×d2×d} holds ∂f_j(x_i)/∂w for N samples, d2 outputs and d weights: row i is sample i's matrix
[d2, d]. It is kept as blocks of columns, one per layer, each in the smallest exact form known for that layer
(`blocks.py`, `layers/`), or with few entries (`sparse.py`).

Two kernels follow from it: the full one, Θ = J Jᵀ over samples and outputs [N·d2, N·d2], and the trace kernel
H_ij = (1/d2) ⟨J_i, J_j⟩_F, [N, N], which the paper uses for every output alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ntkfl.errors import ModelError, NTKFLError
from ntkfl.tangent.blocks import Block, DenseBlock

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

RowIndex = int | slice | Sequence[int] | Tensor
HALF_TYPES = (torch.float16, torch.bfloat16)  # their kernels are summed in float32: a sum may leave their range
_DENSE_NUMBERS = 2**26  # of each side, that a Gram matrix across unlike forms makes dense at a time


class Jacobian:
    """Rows are samples. `shape` is (N, d2, d), columns in `named_parameters()` order of the trainable parameters.

    Blocks of columns, of one form for all rows; columns that no block covers are zero (an unused parameter).
    """

    def __init__(self, blocks: Sequence[Block], outputs: int, columns: int) -> None:
        if not blocks:
            raise ModelError("the model's output depends on none of its trainable parameters")
        self.blocks = tuple(blocks)
        self.shape = (self.blocks[0].tensors()[0].shape[0], outputs, columns)

    @property
    def layout(self) -> tuple[object, ...]:
        """The shape of a row, and the form of each block."""
        return (self.shape[1:], *(block.layout for block in self.blocks))

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything stored; the first dimension of each is the row."""
        return tuple(t for block in self.blocks for t in block.tensors())

    def jvp(self, delta: Tensor) -> Tensor:
        """J δ = Σ_b J_b δ_b over the blocks, the change of the linearised outputs: [..., d] -> [..., N, d2].

        Costs about a forward pass for every leading direction; no more memory than the result and a layer's outputs.
        """
        N, d2, d = self.shape
        delta = self._check("delta", delta, (d,))
        out = delta.new_zeros((*delta.shape[:-1], N, d2))
        for block in self.blocks:
            block.add_jvp(out, delta)
        return out

    def vjp(self, cotangent: Tensor) -> Tensor:
        """Jᵀ R summed over samples and outputs: [..., N, d2] -> [..., d]. Costs what `jvp` does."""
        N, d2, d = self.shape
        cotangent = self._check("the cotangent", cotangent, (N, d2))
        out = cotangent.new_zeros((*cotangent.shape[:-2], d))
        for block in self.blocks:
            block.add_vjp(out, cotangent)
        return out

    def __matmul__(self, delta: Tensor) -> Tensor:
        """J @ δ is `jvp`."""
        return self.jvp(delta)

    def product(self, cotangent: Tensor) -> Tensor:
        """Θ R = J Jᵀ R with the full kernel, which is never made: [N, d2] -> [N, d2]. Costs a `vjp` and a `jvp`."""
        return self.jvp(self.vjp(cotangent))

    def gram(self, other: Jacobian) -> Tensor:
        """(1/d2)⟨J_i, J'_j⟩_F against another Jacobian of the same network: [N, N'].

        A layer of n_in inputs and n_out outputs used once per sample costs N·N'·(d2·n_out + n_in) multiplications,
        where its derivatives would take N·N'·d2·n_out·n_in. What the two store in unlike forms is made dense for it,
        some rows at a time.
        """
        check_same_network([self, other])
        if self.dtype in HALF_TYPES:
            wide = self.to(torch.float32)
            return wide.gram(wide if other is self else other.to(torch.float32)).to(self.dtype)
        left, right = self, other
        if left.layout != right.layout:
            few = max(1, _DENSE_NUMBERS // (self.shape[1] * self.shape[2]))
            if max(len(left), len(right)) > few:
                return torch.cat([torch.cat([a.gram(b) for b in right._split(few)], 1) for a in left._split(few)])
            left, right = _in_one_form([left, right])
        grams = (mine.gram(theirs) for mine, theirs in zip(left.blocks, right.blocks, strict=True))
        return reduce(Tensor.add_, grams).div_(self.shape[1])

    def kernel(self) -> Tensor:
        """The trace kernel H_ij = (1/d2)⟨J_i, J_j⟩_F, [N, N], exactly symmetric; N² memory.

        Computed by blocks of the upper triangle: half the products, and blocks that stay in a CPU's cache.
        """
        if self.dtype in HALF_TYPES:
            return self.to(torch.float32).kernel().to(self.dtype)
        H = torch.empty(len(self), len(self), dtype=self.dtype, device=self.device)
        size = 512 if self.device.type == "cpu" else 8192
        parts = self._split(size)
        for i, left in enumerate(parts):
            rows = slice(i * size, i * size + len(left))
            for j, right in enumerate(parts[i:], start=i):
                columns = slice(j * size, j * size + len(right))
                block = left.gram(right)
                H[rows, columns] = (block + block.T) / 2 if i == j else block
                if i != j:
                    H[columns, rows] = block.T
        return H

    def dense(self) -> Tensor:
        """The whole tensor [N, d2, d]; N·d2·d numbers, so only for small cases."""
        out = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for block in self.blocks:
            dense = block.densify()
            dense.scatter(out, dense.values)
        return out

    def norms(self) -> Tensor:
        """‖J_i‖_F of each sample's [d2, d] matrix, the root of the sum of squares over blocks: float64 [N].

        Exact for dense, sparse and linear layers; where a layer is used at several positions of a sample it is the
        bound ‖g‖ ‖[a, 1]‖, or that up to a factor which is the same for all rows (a convolution's overlaps).
        """
        return torch.stack([block.norms() for block in self.blocks]).square().sum(0).sqrt()

    def scaled(self, factors: Tensor) -> Jacobian:
        """Row i times factors[i], for factors [N]. Costs a copy of the sensitivities, or of all derivatives."""
        factors = self._check("factors", factors, self.shape[:1])
        return Jacobian([block.scaled(factors) for block in self.blocks], *self.shape[1:])

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Jacobian:
        """The same with every stored tensor changed."""
        blocks = [block.with_tensors(tuple(change(t) for t in block.tensors())) for block in self.blocks]
        return Jacobian(blocks, *self.shape[1:])

    def __getitem__(self, index: RowIndex) -> Jacobian:
        """The rows at `index` (an int keeps its dimension); a plain slice shares memory with this Jacobian."""
        if isinstance(index, slice) and index.step in (None, 1):
            return self.mapped(lambda t: t[index])
        # Of a tensor [N, d2, d], J[0, 1] would be one output's derivatives; as a list of rows it would be taken in
        # silence.
        if isinstance(index, tuple | EllipsisType | None):
            raise ModelError(f"a Jacobian is indexed by rows only: use J[[0, 1]], or J.dense()[...]; got {index!r}")
        if not isinstance(index, slice | Tensor):
            index = torch.as_tensor(index, dtype=None if isinstance(index, int) or len(index) else torch.int64)
        rows = torch.arange(len(self))[index.cpu() if isinstance(index, Tensor) else index].reshape(-1).to(self.device)
        return self.mapped(lambda t: t[rows])

    def _split(self, size: int) -> list[Jacobian]:
        """Parts of this many rows, at least one."""
        return [self[at : at + size] for at in range(0, max(len(self), 1), size)]

    def to(self, *target: Any) -> Jacobian:
        """The same on a device, in a floating type, or both, as `Tensor.to` takes them: J.to("cuda", torch.float64)."""

        def moved(t: Tensor) -> Tensor:
            found = t.to(*target)
            if not found.is_floating_point() and t.is_floating_point():
                raise ModelError(f"derivatives have a floating type, not {found.dtype}")
            return found if t.is_floating_point() else t.to(found.device)  # tokens and positions stay integers

        return self.mapped(moved)

    def double(self) -> Jacobian:
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
        return sum(t.nbytes for t in self.tensors())

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        N, d2, d = self.shape
        return f"Jacobian(N={N}, d2={d2}, d={d}, {self.nbytes / 2**20:.1f} MiB, {self.dtype})"

    def _check(self, what: str, tensor: Tensor, tail: tuple[int, ...]) -> Tensor:
        """The tensor in this Jacobian's type; `ModelError` unless its shape ends in `tail`."""
        if not isinstance(tensor, Tensor):
            raise ModelError(f"{what} must be a tensor, got an object of type {type(tensor).__name__}")
        if tuple(tensor.shape[tensor.ndim - len(tail) :]) != tail:
            raise ModelError(f"{what} must end in shape {list(tail)}, got {list(tensor.shape)}")
        return tensor.to(device=self.device, dtype=self.dtype)


def concatenate(jacobians: Sequence[Jacobian]) -> Jacobian:
    """Rows of several Jacobians of one network, in order: [N_1, d2, d], [N_2, d2, d] … -> [Σ N_i, d2, d].

    All are copied into one form, so that their products are one product. Where the forms differ, what is unlike becomes
    dense, every derivative stored: single blocks where all have blocks of the same columns (sequences of several
    lengths), else everything, Σ N_i·d2·d numbers (a sparsified Jacobian with one of another form).
    """
    if not jacobians:
        raise NTKFLError("nothing to concatenate: the list of Jacobians is empty")
    check_same_network(jacobians)
    first, *others = _in_one_form(jacobians)
    if not others:
        return first
    parts = zip(*(J.tensors() for J in (first, *others)), strict=True)
    joined = iter([torch.cat(tensors) for tensors in parts])
    return first.mapped(lambda _: next(joined))


def _in_one_form(jacobians: Sequence[Jacobian]) -> Sequence[Jacobian]:
    """The same Jacobians with one layout: blocks of one layout as they are, others dense."""
    if len({J.layout for J in jacobians}) == 1:
        return jacobians
    _, outputs, columns = jacobians[0].shape
    if len({tuple(block.layout[1] for block in J.blocks) for J in jacobians}) > 1:
        return [Jacobian([DenseBlock(J.dense(), (slice(0, columns),))], outputs, columns) for J in jacobians]
    alike = [len({block.layout for block in same}) == 1 for same in zip(*(J.blocks for J in jacobians), strict=True)]
    return [
        Jacobian([b if keep else b.densify() for b, keep in zip(J.blocks, alike, strict=True)], outputs, columns)
        for J in jacobians
    ]


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
