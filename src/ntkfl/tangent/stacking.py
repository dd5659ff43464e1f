"""Rows of several Jacobians as one: the paper's global Jacobian, put together piece by piece, in memory or in files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ntkfl.errors import ConfigError, NTKFLError
from ntkfl.tangent.jacobian import BlockJacobian, Jacobian, RowIndex, check_jacobian, check_same_network, row_index

PART_BYTES = 2**25  # of rows in a file that are used at a time: they stay in a CPU's caches


def concatenate(jacobians: Sequence[Jacobian]) -> Jacobian:
    """Rows of several Jacobians of one network, in order. Forms may differ. A single one is returned as it is."""
    if not jacobians:
        raise NTKFLError("nothing to concatenate: the list of Jacobians is empty")
    if len(jacobians) == 1:
        return jacobians[0]
    stack = Stack(sum(len(J) for J in jacobians))
    for J in jacobians:
        stack.add(J)
    return stack.whole()


class Stack:
    """Room for `rows` rows, filled by one Jacobian after the other.

    Each is copied to its place and can be let go: the whole is never there twice. Consecutive ones of one layout share
    one form, so that their products are one product; room not used is never touched, so it costs no memory.

    With a folder as `store` the rows lie in files there, and products of `whole` pass through them 32 MiB at a time.
    """

    def __init__(self, rows: int, store: str | Path | None = None) -> None:
        if not isinstance(store, str | Path | None):
            raise ConfigError(f"store must be a folder or None, not {store!r}")
        if store is not None and not Path(store).is_dir():
            raise ConfigError(f"there is no folder {store} for the rows: make it first")
        self.rows, self.filled = rows, 0
        self.store = None if store is None else Path(store)
        self._runs: list[_Run] = []

    def add(self, J: Jacobian) -> None:
        check_jacobian(J)
        for part in [part for _, part in J.parts()] if isinstance(J, StackedJacobian) else [J]:
            assert isinstance(part, BlockJacobian)
            if self._runs:
                check_same_network([self._runs[0].first, part])
            if self.filled + len(part) > self.rows:
                raise NTKFLError(f"room for {self.rows} rows, and {self.filled + len(part)} came")
            if not self._runs or self._runs[-1].first.layout != part.layout:
                self._runs.append(_Run(part, self.rows - self.filled, self.store))
            self._runs[-1].add(part)
            self.filled += len(part)

    def whole(self) -> Jacobian:
        if not self._runs:
            raise NTKFLError("nothing to concatenate: no Jacobian was added")
        wholes = [run.jacobian() for run in self._runs]
        if self.store is None:
            return wholes[0] if len(wholes) == 1 else StackedJacobian(wholes)
        parts = []
        for J in wholes:
            rows = max(1, PART_BYTES * len(J) // max(1, J.nbytes))
            parts += [J[at : at + rows] for at in range(0, max(1, len(J)), rows)]
        return StackedJacobian(parts, self._runs[0].first.device)


class _Run:
    """Rows of one layout."""

    def __init__(self, first: BlockJacobian, rows: int, store: Path | None) -> None:
        empty = [b.with_tensors(tuple(t.new_empty((0, *t.shape[1:])) for t in b.tensors())) for b in first.blocks]
        self.first = BlockJacobian(empty, *first.shape[1:])  # the layout alone: no row is held

        def room(t: Tensor) -> Tensor:
            shape = (rows, *t.shape[1:])
            return t.new_empty(shape) if store is None else mapped_file(shape, t.dtype, store)

        self.room = [tuple(room(t) for t in block.tensors()) for block in first.blocks]
        self.filled = 0

    def add(self, J: BlockJacobian) -> None:
        at = slice(self.filled, self.filled + len(J))
        for block, room in zip(J.blocks, self.room, strict=True):
            for target, t in zip(room, block.tensors(), strict=True):
                target[at] = t
        self.filled += len(J)

    def jacobian(self) -> BlockJacobian:
        blocks = [
            block.with_tensors(tuple(t[: self.filled] for t in room))
            for block, room in zip(self.first.blocks, self.room, strict=True)
        ]
        return BlockJacobian(blocks, *self.first.shape[1:])


class StackedJacobian(Jacobian):
    """Rows in parts, one after the other: of several forms, or in files. Products take one part at a time to `device`,
    in `dtype`, row i times factors[i].
    """

    def __init__(
        self,
        parts: Sequence[BlockJacobian],
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        factors: Tensor | None = None,
    ) -> None:
        self.stored, self.factors = tuple(parts), factors
        self._device, self._dtype = device or parts[0].device, dtype or parts[0].dtype
        self.shape = (sum(len(part) for part in parts), *parts[0].shape[1:])

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for part in self.stored for t in part.tensors())

    def parts(self) -> Iterator[tuple[slice, BlockJacobian]]:
        """Some rows after the other, where and as products want them."""
        start = 0
        for stored in self.stored:
            at = slice(start, start := start + len(stored))
            same = (stored.device, stored.dtype) == (self.device, self.dtype)
            part = stored if same else stored.to(self.device, self.dtype)
            yield at, part if self.factors is None else part.scaled(self.factors[at])

    def jvp(self, delta: Tensor) -> Tensor:
        delta = self._check("delta", delta, self.shape[2:])
        return torch.cat([part.jvp(delta) for _, part in self.parts()], dim=-2)

    def vjp(self, cotangent: Tensor) -> Tensor:
        cotangent = self._check("the cotangent", cotangent, self.shape[:2])
        total = cotangent.new_zeros((*cotangent.shape[:-2], self.shape[2]))
        for at, part in self.parts():
            total += part.vjp(cotangent[..., at, :])
        return total

    def gram(self, other: Jacobian) -> Tensor:
        return torch.cat([part.gram(other) for _, part in self.parts()])

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for _, part in self.parts()])

    def norms(self) -> Tensor:
        return torch.cat([part.norms() for _, part in self.parts()])

    def scaled(self, factors: Tensor) -> StackedJacobian:
        factors = self._check("factors", factors, self.shape[:1])
        factors = factors if self.factors is None else factors * self.factors
        return StackedJacobian(self.stored, self.device, self.dtype, factors)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)([part.mapped(change) for part in self.stored], self.device, self.dtype, self.factors)

    def to(self, *targets: torch.device | str | torch.dtype) -> Self:
        """Where products are made and in which precision; the rows stay where and as they are."""
        empty = self.stored[0][:0].to(self.device, self.dtype).to(*targets)
        return type(self)(self.stored, empty.device, empty.dtype, self.factors)

    def __getitem__(self, index: RowIndex) -> Jacobian:
        if isinstance(index, slice) and index.step in (None, 1):
            start, stop, _ = index.indices(len(self))
            parts, first = [], 0
            for part in self.stored:
                parts.append(part[max(0, start - first) : max(0, stop - first)])
                first += len(part)
            parts = [part for part in parts if len(part)] or parts[:1]
            return StackedJacobian(
                parts, self.device, self.dtype, None if self.factors is None else self.factors[index]
            )
        rows = row_index(index, len(self), torch.device("cpu"))
        starts = torch.tensor([0, *[len(part) for part in self.stored[:-1]]]).cumsum(0)
        owner = torch.searchsorted(starts, rows, right=True) - 1
        # Consecutive rows of one part travel together, so that order is kept with few pieces.
        runs = torch.unique_consecutive(owner, return_counts=True)
        pieces: list[Jacobian] = []
        at = 0
        for which, length in zip(runs[0].tolist(), runs[1].tolist(), strict=True):
            pieces.append(self.stored[which][rows[at : at + length] - starts[which]])
            at += length
        picked = (concatenate(pieces) if pieces else self.stored[0][:0]).to(self.device, self.dtype)
        return picked if self.factors is None else picked.scaled(self.factors[rows.to(self.device)])


def mapped_file(shape: tuple[int, ...], dtype: torch.dtype, folder: Path) -> Tensor:
    """An array in a file of that folder, which goes with it: the name is removed at once."""
    handle, name = tempfile.mkstemp(suffix=".rows", dir=folder)
    os.close(handle)
    try:
        numbers = torch.Size(shape).numel()
        return torch.from_file(name, shared=True, size=numbers, dtype=dtype).view(shape)
    finally:
        os.unlink(name)
