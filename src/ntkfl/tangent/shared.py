"""Rows that several servers hold, each those of its own clients: the update of all of them, by sums between servers.

The evolution touches rows only by J v, which each server computes for its own, and Jᵀ r, a sum over servers. So every
server evolves its own residuals, and what crosses are d numbers a product and a few norms; no row leaves its server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from ntkfl.tangent.jacobian import Jacobian, Part, RowIndex


class SharedJacobian(Jacobian):
    """This server's rows, `own`; the other processes of `group` (all, if none is named) hold the others.

    All is of these rows, but `vjp`, which is of everybody's: every server calls the same things in the same order.
    """

    def __init__(self, own: Jacobian, group: dist.ProcessGroup | None = None) -> None:
        self.own, self.group, self.shape = own, group, own.shape
        held = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
        held[dist.get_rank(group)] = len(own)
        counts = self._add_up(held.to(own.device)).tolist()
        self._part = Part(sum(counts), sum(counts[: dist.get_rank(group)]), self._add_up)

    @property
    def part(self) -> Part:
        return self._part

    def _add_up(self, ours: Tensor) -> Tensor:
        dist.all_reduce(ours, group=self.group)
        return ours

    def jvp(self, delta: Tensor) -> Tensor:
        return self.own.jvp(delta)

    def vjp(self, cotangent: Tensor) -> Tensor:
        return self._add_up(self.own.vjp(cotangent))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.own.tensors()

    def gram(self, other: Jacobian) -> Tensor:
        return self.own.gram(other)

    def dense(self) -> Tensor:
        return self.own.dense()

    def norms(self) -> Tensor:
        return self.own.norms()

    def scaled(self, factors: Tensor) -> SharedJacobian:
        return SharedJacobian(self.own.scaled(factors), self.group)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(self.own.mapped(change), self.group)

    def __getitem__(self, index: RowIndex) -> Jacobian:
        return self.own[index]
