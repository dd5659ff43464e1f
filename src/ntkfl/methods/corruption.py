"""How numbers in a reply are corrupted by a Byzantine client, in studies of such clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ntkfl.methods.inspection import Corruption
from ntkfl.tangent import Jacobian
from ntkfl.tangent.factored import FactoredBlock
from ntkfl.tangent.jacobian import Block, BlockJacobian
from ntkfl.tangent.sparse import SparseBlock
from ntkfl.wire import Message

Change = Callable[[Tensor], Tensor]


def change_of(corruption: Corruption) -> Change:
    """What becomes of rows [n, ...]: turned round, or random of the same norms; `scale` times as large."""
    if corruption.kind == "sign-flip":
        return lambda rows: -corruption.scale * rows
    draws = torch.Generator().manual_seed(corruption.seed)
    return lambda rows: corruption.scale * _random(rows, draws)


def with_numbers(reply: Message, change: Change) -> Message:
    """The reply with all its real numbers changed."""
    return replace(reply, arrays={n: change(a) if a.is_floating_point() else a for n, a in reply.arrays.items()})


def corrupted_jacobian(J: Jacobian, change: Change, draws: torch.Generator | None) -> Jacobian:
    """J with its rows changed. A factored row is changed in its sensitivities; with `draws`, what else there is of it
    (inputs; of sparse rows, positions) is random too.
    """
    assert isinstance(J, BlockJacobian)
    blocks: list[Block] = []
    for block in J.blocks:
        if isinstance(block, SparseBlock):
            size = block.outputs * block.columns
            positions = block.positions if draws is None else _positions(block.positions, size, draws)
            blocks.append(block.with_tensors((change(block.values), positions)))
        elif isinstance(block, FactoredBlock):
            inputs = block.a if draws is None or not block.a.is_floating_point() else _random(block.a, draws)
            blocks.append(block.with_tensors((inputs, change(block.g))))
        else:
            blocks.append(block.with_tensors(tuple(change(t) for t in block.tensors())))
    return BlockJacobian(blocks, *J.shape[1:])


def _random(rows: Tensor, draws: torch.Generator) -> Tensor:
    """Of the same norms as rows [n, ...]."""
    noise: Tensor = torch.randn(rows.shape, generator=draws).to(rows)
    lengths: Tensor = rows.flatten(1).norm(dim=1) / noise.flatten(1).norm(dim=1)
    return noise * lengths.view(-1, *[1] * (rows.ndim - 1))


def _positions(like: Tensor, size: int, draws: torch.Generator) -> Tensor:
    """Other positions [n, k], increasing, below `size`."""
    n, k = like.shape
    drawn = torch.randint(size - k + 1, (n, k), generator=draws).sort(1).values
    return (drawn + torch.arange(k)).to(like)
