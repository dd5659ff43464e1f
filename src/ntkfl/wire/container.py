"""The one place that knows bytes: a checked container of named arrays.

    magic "NTKF" | version u8 | kind u8 | round u32 | arrays u16
    per array: name length u8, name (ASCII), dtype u8, dimensions u8, sizes u32 each
    the arrays' bytes, little-endian, in that order | CRC-32 of all before it, u32

Integers are little-endian. Nothing is trusted: every size is checked against the bytes that are there before anything
is allocated, and a message that does not end exactly where it should is refused. An array costs time to make however
empty it is, so a message has at most 64 of them, and one more for every 4 KiB: what a byte costs to read is bounded.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkfl.errors import MessageError

MAGIC = b"NTKF"
VERSION = 1
MOST_DIMENSIONS = 8
MOST_ARRAYS = 64  # of a small message
_ARRAY_BYTES = 4096  # of a large one, for each more
_HEADER = struct.Struct("<4sBBIH")
_CRC = struct.Struct("<I")
_DTYPES = (
    (torch.float32, np.dtype("<f4")),
    (torch.float64, np.dtype("<f8")),
    (torch.float16, np.dtype("<f2")),
    (torch.uint8, np.dtype("<u1")),
    (torch.int8, np.dtype("<i1")),
    (torch.int16, np.dtype("<i2")),
    (torch.int32, np.dtype("<i4")),
    (torch.int64, np.dtype("<i8")),
)
_CODE = {dtype: i for i, (dtype, _) in enumerate(_DTYPES)}


def pack(kind: int, round: int, arrays: Mapping[str, Tensor]) -> bytes:
    """The container's bytes. Arrays may live on any device and have any strides."""
    parts: list[bytes | memoryview] = [pack_header(kind, round, arrays)]
    for tensor in arrays.values():
        dtype = _DTYPES[_CODE[tensor.dtype]][1]
        values = np.ascontiguousarray(tensor.detach().cpu().numpy().astype(dtype, copy=False))
        parts.append(values.reshape(-1).view(np.uint8).data)
    size = sum(map(len, parts)) + _CRC.size
    if len(arrays) > most_arrays(size):
        raise MessageError(f"{len(arrays)} arrays in {size} bytes are more than a message may have: use codec 'dense'")
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join((*parts, _CRC.pack(crc)))


def pack_header(kind: int, round: int, arrays: Mapping[str, Tensor]) -> bytes:
    """What stands before the arrays' own bytes: kind and round, and each array's name, type and shape."""
    parts = [_HEADER.pack(MAGIC, VERSION, kind, round, len(arrays))]
    for name, tensor in arrays.items():
        label = name.encode("ascii")
        if tensor.dtype not in _CODE:
            raise MessageError(f"array {name!r} has type {tensor.dtype}, which messages do not carry")
        form = f"<B{len(label)}sBB{tensor.ndim}I"
        parts.append(struct.pack(form, len(label), label, _CODE[tensor.dtype], tensor.ndim, *tensor.shape))
    return b"".join(parts)


def most_arrays(size: int) -> int:
    """That a message of `size` bytes may have."""
    return MOST_ARRAYS + size // _ARRAY_BYTES


def unpack(payload: bytes | memoryview) -> tuple[int, int, dict[str, Tensor]]:
    """(kind, round, arrays) of a container; `MessageError` for anything that is not exactly one."""
    if len(payload) < _HEADER.size + _CRC.size:
        raise MessageError(f"a message of {len(payload)} bytes is shorter than any message")
    magic, version, kind, round, count = _HEADER.unpack_from(payload)
    if magic != MAGIC:
        raise MessageError("not a message: it does not begin with the mark of one")
    if version != VERSION:
        raise MessageError(f"message version {version}; this side speaks version {VERSION}")
    if count > most_arrays(len(payload)):
        raise MessageError(f"{count} arrays in {len(payload)} bytes are more than a message may have")
    body = memoryview(payload)[: -_CRC.size]
    if zlib.crc32(body) != _CRC.unpack_from(payload, len(body))[0]:
        raise MessageError("the message was damaged on its way: its checksum does not match")
    heads: list[tuple[str, int, tuple[int, ...]]] = []
    at = _HEADER.size
    try:
        for _ in range(count):
            length = body[at]
            name = str(body[at + 1 : at + 1 + length], "ascii")
            code, ndim = body[at + 1 + length], body[at + 2 + length]
            if ndim > MOST_DIMENSIONS:
                raise MessageError(f"array {name!r} has {ndim} dimensions, more than any message needs")
            shape = struct.unpack_from(f"<{ndim}I", body, at + 3 + length)
            heads.append((name, code, shape))
            at += 3 + length + 4 * ndim
    except (IndexError, struct.error, UnicodeDecodeError):
        raise MessageError("the message's list of arrays is broken") from None
    arrays: dict[str, Tensor] = {}
    for name, code, shape in heads:
        if code >= len(_DTYPES) or name in arrays:
            raise MessageError(f"array {name!r} has an unknown type or stands twice")
        dtype = _DTYPES[code][1]
        size = math.prod(shape) * dtype.itemsize
        if at + size > len(body):
            raise MessageError(f"array {name!r} of shape {list(shape)} does not fit into the message")
        try:
            values: NDArray[Any] = np.ndarray(shape, dtype, body, at)
            arrays[name] = torch.from_numpy(values.astype(dtype.newbyteorder("=")))
        except (ValueError, TypeError, OverflowError, RuntimeError):  # no numbers, in a shape too large to be one
            raise MessageError(f"array {name!r} cannot have the shape {list(shape)}") from None
        at += size
    if at != len(body):
        raise MessageError(f"{len(body) - at} bytes too many at the end of the message")
    return kind, round, arrays
