"""A Jacobian as named arrays: exactly what it stores, and out of a stranger's arrays only what fits the network.

Block i of columns has `i.spans` (int64 [k, 2]: first and last-plus-one column), then either `i.values` (dense), or the
factors `i.a` and `i.g`; `i.layer` (int64: the block's number in `BLOCKS`, its settings) unless it is a linear layer.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.tangent.blocks import Block, DenseBlock, FactoredBlock
from ntkfl.tangent.jacobian import Jacobian
from ntkfl.tangent.layers import BLOCKS, LinearBlock
from ntkfl.wire.message import NamedArrays


def pack_jacobian(J: Jacobian) -> dict[str, Tensor]:
    """A Jacobian's stored form as arrays: exactly what it holds, nothing expanded."""
    arrays = {"jacobian": torch.tensor(J.shape[1:], dtype=torch.int64)}
    for i, block in enumerate(J.blocks):
        if isinstance(block, FactoredBlock):
            arrays[f"{i}.spans"] = _spans((block.weight, block.bias))
            if not isinstance(block, LinearBlock):
                arrays[f"{i}.layer"] = torch.tensor([BLOCKS.index(type(block)), *block.settings], dtype=torch.int64)
            arrays |= {f"{i}.a": block.a, f"{i}.g": block.g}
        else:
            assert isinstance(block, DenseBlock)
            arrays |= {f"{i}.spans": _spans(block.columns), f"{i}.values": block.values}
    return arrays


def unpack_jacobian(message: NamedArrays, outputs: int, columns: int, like: Tensor) -> Jacobian:
    """The Jacobian in an upload, every shape and column span checked against the network's (d2, d)."""
    check_network(message, outputs, columns)
    blocks, claimed, rows = list[Block](), list[slice](), None
    while f"{(i := len(blocks))}.spans" in message.arrays:
        spans = _unpack_spans(message.take(f"{i}.spans", (None, 2)), columns)
        claimed += filter(None, spans)
        read = _dense if f"{i}.values" in message.arrays else _factored
        blocks.append(read(message, i, rows, outputs, spans, like))
        rows = len(blocks[-1].tensors()[0])
    if not blocks or not rows:
        raise MessageError("an upload without a Jacobian")
    claimed.sort(key=lambda s: int(s.start))
    if any(a.stop > b.start for a, b in itertools.pairwise(claimed)):
        raise MessageError("two blocks of a Jacobian claim the same weights")
    return Jacobian(blocks, outputs, columns)


def check_network(message: NamedArrays, outputs: int, columns: int) -> None:
    """`MessageError` unless the message says that its Jacobian is of a network with this d2 and d."""
    shape = message.take("jacobian", (2,)).tolist()
    if shape != [outputs, columns]:
        raise MessageError(f"a Jacobian of another network: {shape} outputs and weights, not {[outputs, columns]}")


def _dense(
    message: NamedArrays, i: int, rows: int | None, outputs: int, spans: list[slice | None], like: Tensor
) -> DenseBlock:
    """A block of derivatives [rows, d2, columns] as they are."""
    columns = tuple(s for s in spans if s is not None)
    if not columns or len(columns) < len(spans):
        raise MessageError("a dense block does not say which weights it is for")
    width = sum(_width(s) for s in columns)
    return DenseBlock(message.take(f"{i}.values", (rows, outputs, width), like).contiguous(), columns)


def _factored(
    message: NamedArrays, i: int, rows: int | None, outputs: int, spans: list[slice | None], like: Tensor
) -> FactoredBlock:
    """A layer's inputs and sensitivities. Whether they fit its weights, the kind of layer says (`BLOCKS`)."""
    number, settings = 0, tuple[int, ...]()
    if f"{i}.layer" in message.arrays:
        layer = message.take(f"{i}.layer", (None,))
        if layer.dtype != torch.int64 or not len(layer) or not 0 <= int(layer[0]) < len(BLOCKS):
            raise MessageError("a layer of unknown kind")
        number, settings = int(layer[0]), tuple(layer[1:].tolist())
    g = message.take(f"{i}.g", (rows, outputs, None), like)
    a = message.take(f"{i}.a")
    # Integers stay what they are: tokens. Whether the block wants such is for the block to say.
    a = a.to(like) if a.is_floating_point() else a.to(like.device)
    weight, bias = spans if len(spans) == 2 else (None, None)
    kind, width = BLOCKS[number], None if bias is None else _width(bias)
    if weight is None or not a.ndim or len(a) != len(g) or not kind.fits(a, g, _width(weight), width, settings):
        raise MessageError("a layer's factors do not fit the weights they claim")
    return kind(a.contiguous(), g.contiguous(), weight, bias, settings)


def _width(span: slice) -> int:
    return int(span.stop - span.start)


def _spans(columns: tuple[slice | None, ...]) -> Tensor:
    """First and last-plus-one column of each piece; (−1, −1) for a missing bias."""
    return torch.tensor([(-1, -1) if s is None else (s.start, s.stop) for s in columns], dtype=torch.int64)


def _unpack_spans(spans: Tensor, columns: int) -> list[slice | None]:
    """The inverse of `_spans`, within the network's columns."""
    if spans.dtype != torch.int64:
        raise MessageError(f"column spans are int64, not {spans.dtype}")
    out: list[slice | None] = []
    for start, stop in spans.tolist():
        if (start, stop) == (-1, -1):
            out.append(None)
        elif 0 <= start < stop <= columns:
            out.append(slice(start, stop))
        else:
            raise MessageError(f"column span {start}:{stop} lies outside the network's {columns} weights")
    return out
