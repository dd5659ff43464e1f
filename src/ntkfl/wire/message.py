"""Messages between server and clients: a kind, a round and named arrays; and their bytes, which only this file knows.

    magic "NTKF" | version u8 | kind u8 | round u32 | arrays u16
    per array: name length u8, name (ASCII), dtype u8, dimensions u8, sizes u32 each
    the arrays' bytes, little-endian, in that order | CRC-32 of all before it, u32

Integers are little-endian. Nothing is trusted: every size is checked against the bytes that are there before anything
is allocated, and a message that does not end exactly where it should is refused. An array costs time to make however
empty it is, so a message has at most 64 of them, and one more for every 4 KiB: what a byte costs to read is bounded.

**Halves** are arrays in float16, each scaled by a power of two so that its largest value neither overflows nor
vanishes. Behind them stands the array `exponents`, int16, one for each in their order:

    value = half · 2^(exponent − 14),   2^exponent ≤ max |value| < 2^(exponent + 1)

`jacobians.py` says what a Jacobian's arrays are.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkfl.errors import MessageError, NotFinite, unknown

# Questions of the server (weights, candidates, curvature) and the three kinds of reply; the position is the byte on
# the wire.
KINDS = ("weights", "candidates", "rows", "update", "sums", "curvature")
MAGIC, VERSION = b"NTKF", 1
EXPONENTS = "exponents"
MOST_DIMENSIONS = 8
MOST_ARRAYS = 64  # of a small message
_ARRAY_BYTES = 4096  # of a large one, for each more
_HEADER, _CRC = struct.Struct("<4sBBIH"), struct.Struct("<I")
_DTYPES = tuple(map(np.dtype, ("<f4", "<f8", "<f2", "<u1", "<i1", "<i2", "<i4", "<i8")))
_TOP = 14  # the largest half lies in [2^14, 2^15): rounding up still stays below float16's 65504
Numbers = NDArray[Any]


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
    """`kind` is one of KINDS; arrays by name, on any device. Those named in `halves` travel as scaled float16: whoever
    reads the message finds float32 values, never scaled numbers.
    """

    kind: str
    round: int
    arrays: Mapping[str, Tensor] = field(repr=False)
    halves: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind of message", self.kind, KINDS)

    def encode(self) -> bytes:
        """The message's bytes: what is counted as uplink or downlink."""
        values = self._values()
        parts: list[bytes | memoryview] = [self._header(values)]
        parts += (array.reshape(-1).view(np.uint8).data for array in values.values())
        size = sum(map(len, parts)) + _CRC.size
        if len(values) > _most_arrays(size):
            raise MessageError(
                f"{len(values)} arrays in {size} bytes are more than a message may have: use codec 'dense'"
            )
        crc = 0
        for part in parts:
            crc = zlib.crc32(part, crc)
        return b"".join((*parts, _CRC.pack(crc)))

    def header(self) -> bytes:
        """What the encoding begins with: kind, round, and the names, types and shapes of all arrays."""
        return self._header(self._values())

    def _values(self) -> dict[str, Numbers]:
        """The arrays as they travel: little-endian, halves scaled, behind these their exponents."""
        values, exponents = dict[str, Numbers](), list[int]()
        for name, tensor in self.arrays.items():
            array = tensor.detach().cpu().numpy()
            if name in self.halves:
                exponents.append(int(np.frexp(np.abs(array).max(initial=0))[1]) - 1)
                array = np.ldexp(array, _TOP - exponents[-1]).astype(np.float16)
            values[name] = np.require(array, array.dtype.newbyteorder("<"), "C")
        return values | {EXPONENTS: np.array(exponents, "<i2")} if self.halves else values

    def _header(self, values: Mapping[str, Numbers]) -> bytes:
        parts = [_HEADER.pack(MAGIC, VERSION, KINDS.index(self.kind), self.round, len(values))]
        for name, array in values.items():
            if array.dtype not in _DTYPES:
                raise MessageError(f"array {name!r} has type {array.dtype}, which messages do not carry")
            form, label = f"<B{len(name)}sBB{array.ndim}I", name.encode("ascii")
            parts.append(struct.pack(form, len(name), label, _DTYPES.index(array.dtype), array.ndim, *array.shape))
        return b"".join(parts)

    @staticmethod
    def decode(payload: bytes | memoryview) -> Message:
        """The message in these bytes; `MessageError` for anything that is not exactly one."""
        if len(payload) < _HEADER.size + _CRC.size:
            raise MessageError(f"a message of {len(payload)} bytes is shorter than any message")
        magic, version, kind, round, count = _HEADER.unpack_from(payload)
        if (magic, version) != (MAGIC, VERSION):
            raise MessageError(f"not a message of version {VERSION}: is ntkfl the same at both ends?")
        if kind >= len(KINDS):
            raise MessageError(f"message kind {kind} is unknown")
        if count > _most_arrays(len(payload)):
            raise MessageError(f"{count} arrays in {len(payload)} bytes are more than a message may have")
        body = memoryview(payload)[: -_CRC.size]
        if zlib.crc32(body) != _CRC.unpack_from(payload, len(body))[0]:
            raise MessageError("the message was damaged on its way: its checksum does not match")
        arrays = _read_arrays(body, count)
        halves = _unscale(arrays)
        return Message(KINDS[kind], round, {name: torch.from_numpy(array) for name, array in arrays.items()}, halves)

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


def _most_arrays(size: int) -> int:
    """That a message of `size` bytes may have."""
    return MOST_ARRAYS + size // _ARRAY_BYTES


def _read_arrays(body: memoryview, count: int) -> dict[str, Numbers]:
    """The `count` arrays behind the header of a message without its checksum."""
    heads: list[tuple[str, int, tuple[int, ...]]] = []
    at = _HEADER.size
    try:
        for _ in range(count):
            end = at + 1 + body[at]
            name, code, dimensions = str(body[at + 1 : end], "ascii"), body[end], body[end + 1]
            if dimensions > MOST_DIMENSIONS:
                raise MessageError(f"array {name!r} has {dimensions} dimensions, more than any message needs")
            heads.append((name, code, struct.unpack_from(f"<{dimensions}I", body, end + 2)))
            at = end + 2 + 4 * dimensions
    except (IndexError, struct.error, UnicodeDecodeError):
        raise MessageError("the message's list of arrays is broken") from None
    arrays: dict[str, Numbers] = {}
    for name, code, shape in heads:
        if code >= len(_DTYPES) or name in arrays:
            raise MessageError(f"array {name!r} has an unknown type or stands twice")
        dtype = _DTYPES[code]
        size = math.prod(shape) * dtype.itemsize
        if at + size > len(body):
            raise MessageError(f"array {name!r} of shape {list(shape)} does not fit into the message")
        try:
            arrays[name] = np.ndarray(shape, dtype, body, at).astype(dtype.newbyteorder("="))
        except (ValueError, TypeError, OverflowError):  # no numbers, in a shape too large to be one
            raise MessageError(f"array {name!r} cannot have the shape {list(shape)}") from None
        at += size
    if at != len(body):
        raise MessageError(f"{len(body) - at} bytes too many at the end of the message")
    return arrays


def _unscale(arrays: dict[str, Numbers]) -> tuple[str, ...]:
    """Give each scaled half its value in float32, in place; the names of these. Values too large become infinite."""
    if EXPONENTS not in arrays:
        return ()
    exponents = arrays.pop(EXPONENTS)
    names = tuple(name for name, array in arrays.items() if array.dtype == np.float16)
    if exponents.dtype != np.int16 or exponents.shape != (len(names),):
        raise MessageError(f"{len(names)} float16 arrays and exponents of {exponents.dtype} {list(exponents.shape)}")
    with np.errstate(over="ignore"):
        for name, exponent in zip(names, exponents.tolist(), strict=True):
            arrays[name] = np.ldexp(arrays[name].astype(np.float32), exponent - _TOP)
    return names


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
