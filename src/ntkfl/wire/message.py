"""Messages between server and clients: a kind, a round and named arrays. `jacobians.py` says what a Jacobian's are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ntkfl.errors import MessageError, NotFinite, unknown
from ntkfl.wire.container import pack, pack_header, unpack
from ntkfl.wire.halves import pack_halves, unpack_halves

# Questions of the server (weights, candidates, curvature) and the three kinds of reply; the position is the byte on
# the wire.
KINDS = ("weights", "candidates", "rows", "update", "sums", "curvature")


class NamedArrays:
    """Named arrays of one kind, checked as they are taken: a message, or a parsed reply."""

    kind: str
    arrays: Mapping[str, Tensor]

    def take(self, name: str, shape: tuple[int | None, ...] | None = None, like: Tensor | None = None) -> Tensor:
        """The array `name` of this shape (None: any size), on the device and in the type of `like`; `MessageError` if
        it is missing or has another shape.
        """
        where = f"a message of kind {self.kind!r}"
        if name not in self.arrays:
            raise MessageError(f"{where} lacks {name!r}; it has {', '.join(map(repr, self.arrays)) or 'nothing':.200}")
        value = self.arrays[name]
        wanted = value.shape if shape is None else shape
        if value.ndim != len(wanted) or any(n not in (None, m) for n, m in zip(wanted, value.shape, strict=True)):
            asked = ["any" if n is None else n for n in wanted]
            raise MessageError(f"{name!r} in {where} has shape {list(value.shape)}, not {asked}")
        return value if like is None else value.to(device=like.device, dtype=like.dtype)

    def vector(self, name: str, like: Tensor) -> Tensor:
        """The array `name` in the shape and type of `like` [d], and on its device."""
        return self.take(name, tuple(like.shape), like)


@dataclass(frozen=True)
class Message(NamedArrays):
    """`kind` is one of KINDS; arrays by name. Those named in `halves` travel as scaled float16: whoever reads the
    message finds float32 values, never scaled numbers.
    """

    kind: str
    round: int
    arrays: Mapping[str, Tensor] = field(repr=False)
    halves: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind of message", self.kind, KINDS)

    def encode(self) -> bytes:
        """The message's bytes, as `container.py` has them: what is counted as uplink or downlink."""
        return pack(KINDS.index(self.kind), self.round, pack_halves(self.arrays, self.halves))

    def header(self) -> bytes:
        """What the encoding begins with: kind, round, and the names, types and shapes of all arrays."""
        return pack_header(KINDS.index(self.kind), self.round, pack_halves(self.arrays, self.halves))

    @staticmethod
    def decode(payload: bytes | memoryview) -> Message:
        """The message in these bytes; `MessageError` for anything that is not exactly one."""
        kind, round, arrays = unpack(payload)
        if kind >= len(KINDS):
            raise MessageError(f"message kind {kind} is unknown")
        arrays, halves = unpack_halves(arrays)
        return Message(KINDS[kind], round, arrays, halves)

    def take(self, name: str, shape: tuple[int | None, ...] | None = None, like: Tensor | None = None) -> Tensor:
        """The array `name`, checked: present, of this shape (None: any size), finite; moved and cast like `like`."""
        value = super().take(name, shape, like)
        check_finite_arrays({name: value})
        return value

    def of_kind(self, kind: str) -> Message:
        """The message itself; `MessageError` where it is of another kind."""
        if self.kind != kind:
            raise MessageError(f"expected a {kind!r} message, got {self.kind!r}")
        return self


def check_finite_arrays(arrays: Mapping[str, Tensor]) -> None:
    """`NotFinite` for the first array with a value that is not finite."""
    for name, array in arrays.items():
        if array.is_floating_point() and not bool(array.isfinite().all()):
            raise NotFinite(f"{name!r} has values that are not finite")


def split_rows(arrays: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """One dictionary per sample, from arrays that have a row for each; what describes the network stands in all."""
    counts = {len(array) for name, array in arrays.items() if not describes(name)}
    if len(counts) != 1:
        raise MessageError("arrays of rows that do not all have one row per sample")
    return [{n: a if describes(n) else a[i : i + 1] for n, a in arrays.items()} for i in range(counts.pop())]


def join_rows(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The arrays of all rows; they must agree in the names, types and shapes of their arrays."""
    first = rows[0]
    if any(list(row) != list(first) for row in rows):
        raise MessageError("rows with different arrays")
    arrays: dict[str, Tensor] = {}
    for name, array in first.items():
        same = [row[name] for row in rows]
        if any((a.dtype, a.shape[1:]) != (array.dtype, array.shape[1:]) for a in same):
            raise MessageError(f"rows whose {name!r} differ in type or shape")
        if not describes(name):
            arrays[name] = torch.cat(same)
        elif all(torch.equal(a, array) for a in same):
            arrays[name] = array
        else:
            raise MessageError(f"rows whose {name!r} differ")
    return arrays


def describes(name: str) -> bool:
    """Whether an array is about the network rather than about samples."""
    return name == "jacobian" or name.endswith((".spans", ".layer"))


def pack_labels(y: Tensor, outputs: int) -> Tensor:
    """Classes in the narrowest integers that hold them; real-valued targets as they are."""
    if y.is_floating_point():
        return y
    return y.to(torch.uint8 if outputs <= 256 else torch.int32)
