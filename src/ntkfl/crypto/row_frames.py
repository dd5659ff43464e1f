"""Frames of rows: one row per sample, all of one size, each sealed to the aggregator for one batch of one run.

    magic "NTKR" | version u8 | round u32 | exchange u8 | SHA-256 of the announcement, 32 bytes
    rows u32 | bytes per row u32 | the rows | CRC-32 of all before it, u32

Integers are little-endian. A client submits its rows so, and the shuffler releases a batch so. Both name the
announcement that the rows answer, so that no two clients can be asked different things under one key. Nothing is
trusted: sizes are checked against the bytes that are there before anything is allocated.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from ntkfl.crypto.context import bind
from ntkfl.crypto.hpke import SealingKey, seal
from ntkfl.errors import MessageError

MAGIC = b"NTKR"
VERSION = 2  # of frames, and of the protocol between the roles
DIGEST_BYTES = 32
_HEADER = struct.Struct(f"<4sBIB{DIGEST_BYTES}sII")
_CRC = struct.Struct("<I")
FRAME_BYTES = _HEADER.size + _CRC.size  # what framing adds to the rows
# Of masks (`masking.py`); they stand here because a shuffler that only passes rows on does without numpy.
SEED_BYTES, WORD_BYTES = 32, 4
MOST_NUMBERS = 1 << 29  # of one vector: its stream stays far below the 2^32 blocks of a nonce
Buffer = TypeVar("Buffer", bytes, memoryview)


class BatchKey(NamedTuple):
    """Which rows belong together: one exchange (upload, scoring, …) of one round. Ordered as time is."""

    round: int
    exchange: int

    def check(self) -> BatchKey:
        """Itself; `MessageError` if a part does not fit its field."""
        if not (0 <= self.round < 1 << 32 and 0 <= self.exchange < 1 << 8):
            raise MessageError(f"round and exchange must fit 32 and 8 bits, got {tuple(self)}")
        return self

    @property
    def number(self) -> int:
        """The key as one number of 40 bits, in the same order."""
        return self.round << 8 | self.exchange


class Announced(NamedTuple):
    """What rows answer: the key of an announcement, and the SHA-256 of all its signed bytes."""

    key: BatchKey
    digest: bytes

    @classmethod
    def of(cls, key: BatchKey, signed: bytes) -> Announced:
        """Of the signed head as it travelled, which both ends hash for themselves."""
        return cls(key, hashlib.sha256(signed).digest())


def pack_rows(announced: Announced, rows: Sequence[bytes]) -> bytes:
    """The rows in their frame: at least one, all of one size."""
    sizes = {len(row) for row in rows}
    if len(sizes) != 1 or 0 in sizes:
        raise MessageError(f"rows must be at least one and of one size, got {len(rows)} of sizes {sorted(sizes)[:4]}")
    key, digest = announced
    frame = b"".join((_HEADER.pack(MAGIC, VERSION, *key, digest, len(rows), sizes.pop()), *rows))
    return frame + _CRC.pack(zlib.crc32(frame))


def unpack_rows(body: Buffer) -> tuple[Announced, list[Buffer]]:
    """What the rows of a frame answer, and the rows; `MessageError` for anything that is not exactly one frame.

    Of a view of the frame, the rows are views: nothing is copied.
    """
    if len(body) < FRAME_BYTES:
        raise MessageError(f"a frame of {len(body)} bytes is shorter than any frame")
    magic, version, round, exchange, digest, count, size = _HEADER.unpack_from(body)
    if (magic, version) != (MAGIC, VERSION):
        raise MessageError(f"not a frame of rows of version {VERSION}: is ntkfl the same at both ends?")
    if not count or not size or len(body) != FRAME_BYTES + count * size:
        raise MessageError(f"{count} rows of {size} bytes do not make a frame of {len(body)} bytes")
    end = len(body) - _CRC.size
    if zlib.crc32(memoryview(body)[:end]) != _CRC.unpack_from(body, end)[0]:
        raise MessageError("the rows were damaged on their way: the checksum does not match")
    rows = [body[at : at + size] for at in range(_HEADER.size, end, size)]
    return Announced(BatchKey(round, exchange), digest), rows


def seal_rows(
    rows: Sequence[bytes], aggregator_public: bytes, federation: str, run: str, announced: Announced
) -> list[bytes]:
    """Each row sealed on its own to the aggregator, so that nothing but the shuffler's memory holds them together."""
    context = _context(federation, run, announced)
    return [seal(aggregator_public, row, context) for row in rows]


def open_row(sealing_key: SealingKey, sealed: bytes, federation: str, run: str, announced: Announced) -> bytes:
    """The row; `TrustError` if it was sealed to another key or for another announcement, or was changed."""
    return sealing_key.open(sealed, _context(federation, run, announced))


def _context(federation: str, run: str, announced: Announced) -> bytes:
    """What a row is sealed for: nobody can carry it into another federation, run or exchange."""
    key, digest = announced
    return bind("ntkfl row v2", federation, run, *key, digest)
