"""Rows of several Jacobians as one: the paper's global Jacobian, put together piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Self, TypeAlias

import torch
from torch import Tensor

from ntkfl.errors import ConfigError, NTKFLError
from ntkfl.tangent.jacobian import BlockJacobian, Jacobian, RowIndex, check_jacobian, check_same_network, row_index
from ntkfl.tangent.streaming import StreamedJacobian, mapped_file


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

    Where the whole would take more than half of what is free on an accelerator, or `store` is "host", the rows stay in
    host memory; where `store` is a folder, as a path or its name, in files there (`Path("host")` is one of that name).
    `whole` then passes them through the device that they came from (`streaming.py`).
    """

    def __init__(self, rows: int, store: str | Path | None = None) -> None:
        self.rows, self.filled = rows, 0
        self.store = _store(store)
        self._runs: list[_Run] = []

    def add(self, J: Jacobian) -> None:
        check_jacobian(J)
        for part in _blocks(J):
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
        parts = [run.jacobian() for run in self._runs]
        return parts[0] if len(parts) == 1 else StackedJacobian(parts)


_Store: TypeAlias = Path | Literal["host"] | None


def _store(given: str | Path | None) -> _Store:
    """A folder that is there, "host" or None."""
    if given is None:
        return None
    if given == "host":
        return "host"
    if not isinstance(given, str | Path):
        raise ConfigError(f'store must be a folder, "host" or None, not {given!r}')
    if not Path(given).is_dir():
        raise ConfigError(f"there is no folder {given} for the rows: make it first")
    return Path(given)


class _Run:
    """Rows of one layout."""

    def __init__(self, first: BlockJacobian, rows: int, store: _Store) -> None:
        empty = [b.with_tensors(tuple(t.new_empty((0, *t.shape[1:])) for t in b.tensors())) for b in first.blocks]
        self.first = BlockJacobian(empty, *first.shape[1:])  # the layout alone: no row is held
        needed = rows * first.nbytes // max(1, len(first))
        self.elsewhere = store is not None or not _fits(needed, first.device)

        def room(t: Tensor) -> Tensor:
            shape = (rows, *t.shape[1:])
            if isinstance(store, Path):
                return mapped_file(shape, t.dtype, store)
            if self.elsewhere:
                return torch.empty(shape, dtype=t.dtype, pin_memory=t.device.type == "cuda")
            return t.new_empty(shape)

        self.room = [tuple(room(t) for t in block.tensors()) for block in first.blocks]
        self.filled = 0

    def add(self, J: BlockJacobian) -> None:
        at = slice(self.filled, self.filled + len(J))
        for block, room in zip(J.blocks, self.room, strict=True):
            for target, t in zip(room, block.tensors(), strict=True):
                target[at] = t
        self.filled += len(J)

    def jacobian(self) -> BlockJacobian | StreamedJacobian:
        blocks = [
            block.with_tensors(tuple(t[: self.filled] for t in room))
            for block, room in zip(self.first.blocks, self.room, strict=True)
        ]
        J = BlockJacobian(blocks, *self.first.shape[1:])
        return StreamedJacobian(J, self.first.device) if self.elsewhere else J


def _blocks(J: Jacobian) -> Iterator[Jacobian]:
    """J in parts of one form each, on its device."""
    if isinstance(J, StackedJacobian):
        for part in J.parts:
            yield from _blocks(part)
    elif isinstance(J, StreamedJacobian):
        for _, rows in J.parts():
            yield rows
    else:
        yield J


def _fits(size: int, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # freed, and torch's to give again
    return 2 * size <= torch.cuda.mem_get_info(device)[0] + kept


class StackedJacobian(Jacobian):
    """Rows in several forms, one part after the other: what mixing forms in a concatenation gives."""

    def __init__(self, parts: Sequence[BlockJacobian | StreamedJacobian]) -> None:
        self.parts = tuple(parts)
        self._lengths = [len(part) for part in self.parts]
        self.shape = (sum(self._lengths), *self.parts[0].shape[1:])

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for part in self.parts for t in part.tensors())

    def jvp(self, delta: Tensor) -> Tensor:
        return torch.cat([part.jvp(delta) for part in self.parts], dim=-2)

    def vjp(self, cotangent: Tensor) -> Tensor:
        cotangent = self._check("the cotangent", cotangent, self.shape[:2])
        pieces = torch.split(cotangent, self._lengths, dim=-2)
        total = self.parts[0].vjp(pieces[0])
        for part, piece in zip(self.parts[1:], pieces[1:], strict=True):
            total += part.vjp(piece)
        return total

    def gram(self, other: Jacobian) -> Tensor:
        return torch.cat([part.gram(other) for part in self.parts])

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts])

    def norms(self) -> Tensor:
        return torch.cat([part.norms() for part in self.parts])

    def scaled(self, factors: Tensor) -> StackedJacobian:
        pieces = torch.split(self._check("factors", factors, self.shape[:1]), self._lengths)
        return StackedJacobian([part.scaled(own) for part, own in zip(self.parts, pieces, strict=True)])

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)([part.mapped(change) for part in self.parts])

    def __getitem__(self, index: RowIndex) -> Jacobian:
        rows = row_index(index, len(self), torch.device("cpu"))
        starts = torch.tensor([0, *self._lengths[:-1]]).cumsum(0)
        owner = torch.searchsorted(starts, rows, right=True) - 1
        # Consecutive rows of one part travel together, so that order is kept with few pieces.
        runs = torch.unique_consecutive(owner, return_counts=True)
        pieces: list[Jacobian] = []
        at = 0
        for part, length in zip(runs[0].tolist(), runs[1].tolist(), strict=True):
            pieces.append(self.parts[part][rows[at : at + length] - starts[part]])
            at += length
        return concatenate(pieces) if pieces else self.parts[0][rows]
