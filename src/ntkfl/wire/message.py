"""Messages between server and clients: a kind, a round and named arrays, and how a Jacobian travels in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.tangent.dense import DenseBlock
from ntkfl.tangent.factored import LinearBlock
from ntkfl.tangent.jacobian import Block, BlockJacobian, Jacobian, StackedJacobian
from ntkfl.wire.container import pack, unpack

# What a message is for; the position is the byte on the wire.
KINDS = ("weights", "upload", "candidates", "losses", "update", "data", "evaluate", "counts")


@dataclass(frozen=True)
class Message:
    """`kind` is one of KINDS; arrays by name."""

    kind: str
    round: int
    arrays: Mapping[str, Tensor] = field(repr=False)

    def encode(self) -> bytes:
        return pack(KINDS.index(self.kind), self.round, self.arrays)

    @staticmethod
    def decode(payload: bytes) -> Message:
        kind, round, arrays = unpack(payload)
        if kind >= len(KINDS):
            raise MessageError(f"message kind {kind} is unknown")
        return Message(KINDS[kind], round, arrays)

    def take(self, name: str, shape: tuple[int | None, ...] | None = None, like: Tensor | None = None) -> Tensor:
        """The array `name`, checked: there, of this shape (None: any size), finite; moved and cast like `like`."""
        if name not in self.arrays:
            raise MessageError(f"a {self.kind!r} message of round {self.round} lacks {name!r}")
        value = self.arrays[name]
        if shape is not None and (
            value.ndim != len(shape)
            or any(want not in (None, have) for want, have in zip(shape, value.shape, strict=True))
        ):
            wanted = ["any" if n is None else n for n in shape]
            raise MessageError(f"{name!r} in a {self.kind!r} message has shape {list(value.shape)}, not {wanted}")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise MessageError(f"{name!r} in a {self.kind!r} message has values that are not finite")
        return value if like is None else value.to(device=like.device, dtype=like.dtype)

    def of_kind(self, kind: str) -> Message:
        if self.kind != kind:
            raise MessageError(f"expected a {kind!r} message, got {self.kind!r}")
        return self


def split_rows(message: Message) -> list[Message]:
    """One message a sample, from one whose arrays have a row for each; what describes all rows stands in every one."""
    counts = {len(array) for name, array in message.arrays.items() if not describes(name)}
    if len(counts) != 1:
        raise MessageError(f"a {message.kind!r} message does not have one row a sample")
    return [
        Message(
            message.kind, message.round, {n: a if describes(n) else a[i : i + 1] for n, a in message.arrays.items()}
        )
        for i in range(counts.pop())
    ]


def join_rows(rows: Sequence[Message]) -> Message:
    """One message of all rows; they must agree in kind, round, and the names, types and shapes of their arrays."""
    first = rows[0]
    for row in rows:
        if (row.kind, row.round, list(row.arrays)) != (first.kind, first.round, list(first.arrays)):
            raise MessageError("rows of different kinds or rounds")
    arrays: dict[str, Tensor] = {}
    for name, array in first.arrays.items():
        same = [row.arrays[name] for row in rows]
        if any((a.dtype, a.shape) != (array.dtype, array.shape) for a in same):
            raise MessageError(f"rows whose {name!r} differ in type or shape")
        if not describes(name):
            if array.shape[:1] != (1,):
                raise MessageError(f"a row's {name!r} must be of one sample, not of shape {list(array.shape)}")
            arrays[name] = torch.cat(same)
        elif all(torch.equal(a, array) for a in same):
            arrays[name] = array
        else:
            raise MessageError(f"rows whose {name!r} differ")
    return Message(first.kind, first.round, arrays)


def describes(name: str) -> bool:
    """Whether an array is about the network rather than about samples."""
    return name == "jacobian" or name.endswith(".spans")


def pack_labels(y: Tensor, outputs: int) -> Tensor:
    """Classes in the narrowest integers that hold them; real-valued targets as they are."""
    if y.is_floating_point():
        return y
    return y.to(torch.uint8 if outputs <= 256 else torch.int32)


def pack_jacobian(J: Jacobian) -> dict[str, Tensor]:
    """A Jacobian's stored form as arrays: exactly what it holds, nothing expanded."""
    if isinstance(J, StackedJacobian):
        raise MessageError("a Jacobian of mixed forms cannot travel in one message: send its parts")
    assert isinstance(J, BlockJacobian)
    arrays = {"jacobian": torch.tensor(J.shape[1:], dtype=torch.int64)}
    for i, block in enumerate(J.blocks):
        if isinstance(block, LinearBlock):
            arrays |= {f"{i}.spans": _spans((block.weight, block.bias)), f"{i}.a": block.a, f"{i}.g": block.g}
        elif isinstance(block, DenseBlock):
            arrays |= {f"{i}.spans": _spans(block.columns), f"{i}.values": block.values}
        else:
            raise MessageError(f"no wire form for a {type(block).__name__}")
    return arrays


def unpack_jacobian(message: Message, outputs: int, columns: int, like: Tensor) -> BlockJacobian:
    """The Jacobian in an upload, every shape and column span checked against the network's (d2, d)."""
    shape = message.take("jacobian", (2,)).tolist()
    if shape != [outputs, columns]:
        raise MessageError(f"a Jacobian of another network: {shape} outputs and weights, not {[outputs, columns]}")
    blocks: list[Block] = []
    rows: int | None = None
    while f"{len(blocks)}.spans" in message.arrays:
        i = len(blocks)
        spans = _unpack_spans(message.take(f"{i}.spans", (None, 2)), columns)
        if f"{i}.values" in message.arrays:
            width = sum(s.stop - s.start for s in spans if s is not None)
            values = message.take(f"{i}.values", (rows, outputs, width), like)
            blocks.append(DenseBlock(values, tuple(s for s in spans if s is not None)))
        else:
            a, g = message.take(f"{i}.a", (rows, None, None), like), message.take(f"{i}.g", (rows, outputs, None), like)
            blocks.append(_linear(a, g, spans))
        rows = blocks[-1].tensors()[0].shape[0]
    if not blocks or not rows:
        raise MessageError("an upload without a Jacobian")
    return BlockJacobian(blocks, outputs, columns)


def _linear(a: Tensor, g: Tensor, spans: list[slice | None]) -> LinearBlock:
    T, n_in = a.shape[1:]
    n_out = g.shape[2] // T if T else 0
    expected = (n_out * n_in, n_out)
    fits = len(spans) == 2 and a.shape[0] == g.shape[0] and T > 0 and n_out * T == g.shape[2]
    if not fits or any(s is not None and s.stop - s.start != n for s, n in zip(spans, expected, strict=True)):
        raise MessageError("a layer's factors do not fit the weights they claim")
    return LinearBlock(a, g, *spans)


def _spans(columns: tuple[slice | None, ...]) -> Tensor:
    return torch.tensor([(-1, -1) if s is None else (s.start, s.stop) for s in columns], dtype=torch.int64)


def _unpack_spans(spans: Tensor, columns: int) -> list[slice | None]:
    out: list[slice | None] = []
    for start, stop in spans.tolist():
        if (start, stop) == (-1, -1):
            out.append(None)
        elif 0 <= start < stop <= columns:
            out.append(slice(start, stop))
        else:
            raise MessageError(f"column span {start}:{stop} lies outside the network's {columns} weights")
    return out
