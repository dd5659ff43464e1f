"""Rows of several Jacobians as one: the paper's global Jacobian, put together piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ntkfl.errors import NTKFLError
from ntkfl.tangent.jacobian import BlockJacobian, Jacobian, RowIndex, check_jacobian, check_same_network, row_index


def concatenate(jacobians: Sequence[Jacobian]) -> Jacobian:
    """Rows of several Jacobians of one network, in order. Forms may differ. A single one is returned as it is."""
    if not jacobians:
        raise NTKFLError("nothing to concatenate: the list of Jacobians is empty")
    if len(jacobians) == 1:
        return jacobians[0]
    for J in jacobians:
        check_jacobian(J)
    stack = Stack(sum(len(J) for J in jacobians))
    for J in jacobians:
        stack.add(J)
    return stack.whole()


class Stack:
    """Room for `rows` rows, filled by one Jacobian after the other.

    Each is copied to its place and can be let go: the whole is never there twice. Consecutive ones of one layout share
    one form, so that their products are one product; room not used is never touched, so it costs no memory.
    """

    def __init__(self, rows: int) -> None:
        self.rows, self.filled = rows, 0
        self._runs: list[_Run] = []

    def add(self, J: Jacobian) -> None:
        """Copy the rows of J behind those that are there."""
        check_jacobian(J)
        for part in J.parts if isinstance(J, StackedJacobian) else [J]:
            assert isinstance(part, BlockJacobian)
            if self._runs:
                check_same_network([self._runs[0].form, part])
            if self.filled + len(part) > self.rows:
                raise NTKFLError(f"the stack has room for {self.rows} rows, and {self.filled + len(part)} came")
            if not self._runs or self._runs[-1].form.layout != part.layout:
                room = [t.new_empty((self.rows - self.filled, *t.shape[1:])) for t in part.tensors()]
                self._runs.append(_Run(part[:0].mapped(torch.clone), room))
            run = self._runs[-1]
            for target, t in zip(run.room, part.tensors(), strict=True):
                target[run.filled : run.filled + len(part)] = t
            run.filled += len(part)
            self.filled += len(part)

    def whole(self) -> Jacobian:
        """All rows added so far, in order."""
        if not self._runs:
            raise NTKFLError("nothing to concatenate: no Jacobian was added")
        wholes = []
        for run in self._runs:
            tensors = iter(run.room)
            wholes.append(run.form.mapped(lambda _, tensors=tensors, run=run: next(tensors)[: run.filled]))  # type: ignore[misc]
        return wholes[0] if len(wholes) == 1 else StackedJacobian(wholes)


@dataclass
class _Run:
    """Room for rows of one layout, which `form` has without any row, and how many are there."""

    form: BlockJacobian
    room: list[Tensor]
    filled: int = 0


class StackedJacobian(Jacobian):
    """Rows in parts of several forms, one after the other."""

    def __init__(self, parts: Sequence[BlockJacobian]) -> None:
        self.parts = tuple(parts)
        self.shape = (sum(len(part) for part in parts), *parts[0].shape[1:])

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for part in self.parts for t in part.tensors())

    def jvp(self, delta: Tensor) -> Tensor:
        return torch.cat([part.jvp(delta) for part in self.parts], dim=-2)

    def vjp(self, cotangent: Tensor) -> Tensor:
        """The sum over parts of each one's own rows."""
        cotangent = self._check("the cotangent", cotangent, self.shape[:2])
        pieces = torch.split(cotangent, [len(part) for part in self.parts], dim=-2)
        return torch.stack([part.vjp(R) for part, R in zip(self.parts, pieces, strict=True)]).sum(0)

    def gram(self, other: Jacobian) -> Tensor:
        """Part by part; each meets the other as it is."""
        return torch.cat([part.gram(other) for part in self.parts])

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts])

    def norms(self) -> Tensor:
        return torch.cat([part.norms() for part in self.parts])

    def scaled(self, factors: Tensor) -> StackedJacobian:
        factors = self._check("factors", factors, self.shape[:1])
        pieces = torch.split(factors, [len(part) for part in self.parts])
        return StackedJacobian([part.scaled(f) for part, f in zip(self.parts, pieces, strict=True)])

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)([part.mapped(change) for part in self.parts])

    def __getitem__(self, index: RowIndex) -> Jacobian:
        """Consecutive rows of one part travel together, so that order is kept with few pieces."""
        rows = row_index(index, len(self), torch.device("cpu"))
        ends = torch.tensor([len(part) for part in self.parts]).cumsum(0)
        owner = torch.searchsorted(ends, rows, right=True)
        pieces: list[Jacobian] = []
        which, lengths = torch.unique_consecutive(owner, return_counts=True)
        for part, own in zip(which.tolist(), torch.split(rows, lengths.tolist()), strict=True):
            first = int(ends[part]) - len(self.parts[part])
            pieces.append(self.parts[part][own - first])
        return concatenate(pieces) if pieces else self.parts[0][:0]
