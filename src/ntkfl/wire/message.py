"""Messages between server and clients: a kind, a round and named arrays; what a Jacobian's are is in `jacobians.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ntkfl.errors import MessageError, NotFinite, unknown
from ntkfl.wire.container import pack, pack_header, unpack
from ntkfl.wire.halves import EXPONENTS, may_overflow, unpack_half

# What a message is for; the position is the byte on the wire.
KINDS = ("weights", "upload", "candidates", "losses", "update", "data", "evaluate", "counts")


@dataclass(frozen=True)
class Message:
    """`kind` is one of KINDS; arrays by name."""

    kind: str
    round: int
    arrays: Mapping[str, Tensor] = field(repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind of message", self.kind, KINDS)

    def encode(self) -> bytes:
        return pack(KINDS.index(self.kind), self.round, self.arrays)

    def here(self) -> Message:
        """The same in this machine's memory."""
        return replace(self, arrays={name: array.cpu() for name, array in self.arrays.items()})

    def header(self) -> bytes:
        """What its encoding begins with: kind, round, and the names, types and shapes of its arrays."""
        return pack_header(KINDS.index(self.kind), self.round, self.arrays)

    @staticmethod
    def decode(payload: bytes | memoryview) -> Message:
        kind, round, arrays = unpack(payload)
        if kind >= len(KINDS):
            raise MessageError(f"message kind {kind} is unknown")
        return Message(KINDS[kind], round, arrays)

    def take(self, name: str, shape: tuple[int | None, ...] | None = None, like: Tensor | None = None) -> Tensor:
        """The array `name`, checked: there, of this shape (None: any size), finite; moved and cast like `like`. Of a
        scaled half its values, in float32 without `like`.
        """
        if name not in self.arrays:
            there = ", ".join(map(repr, self.arrays)) or "nothing"
            raise MessageError(f"a {self.kind!r} message of round {self.round} lacks {name!r}; it has {there:.200}")
        value = self.arrays[name]
        if shape is not None and (
            value.ndim != len(shape)
            or any(want not in (None, have) for want, have in zip(shape, value.shape, strict=True))
        ):
            wanted = ["any" if n is None else n for n in shape]
            raise MessageError(f"{name!r} in a {self.kind!r} message has shape {list(value.shape)}, not {wanted}")
        if value.is_floating_point() and not self._finite and not bool(value.isfinite().all()):
            raise NotFinite(f"{name!r} in a {self.kind!r} message has values that are not finite")
        if name not in self._exponents:
            return value if like is None else value.to(device=like.device, dtype=like.dtype)
        exponent, like = self._exponents[name], torch.empty(0) if like is None else like
        value = unpack_half(value, exponent, like)
        if may_overflow(exponent, like.dtype) and not bool(value.isfinite().all()):
            raise NotFinite(f"{name!r} in a {self.kind!r} message has values that are not finite")
        return value

    @cached_property
    def _exponents(self) -> dict[str, int]:
        """Of arrays that travel as scaled halves: they are all of its float16 arrays, in their order."""
        if EXPONENTS not in self.arrays:
            return {}
        names = [name for name, array in self.arrays.items() if array.dtype == torch.float16]
        exponents = self.arrays[EXPONENTS]
        if exponents.dtype != torch.int16 or exponents.shape != (len(names),):
            raise MessageError(f"a {self.kind!r} message has {len(names)} float16 arrays and other exponents")
        return dict(zip(names, exponents.tolist(), strict=True))

    @cached_property
    def _finite(self) -> bool:
        """Whether the sum of all arrays is: then all elements are too. Far cheaper than looking at each, and on an
        accelerator waited for once. A sum may overflow: then the elements decide.
        """
        sums = [array.sum(dtype=torch.float64) for array in self.arrays.values() if array.is_floating_point()]
        return math.isfinite(sum(one.to(sums[0].device) for one in sums))

    @cached_property
    def read(self) -> dict[str, Any]:
        """What a method has read of this message: validation and the round look at it, and it is decoded once."""
        return {}

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
    return name == "jacobian" or name.endswith((".spans", ".layer"))


def pack_labels(y: Tensor, outputs: int) -> Tensor:
    """Classes in the narrowest integers that hold them; real-valued targets as they are."""
    if y.is_floating_point():
        return y
    return y.to(torch.uint8 if outputs <= 256 else torch.int32)
