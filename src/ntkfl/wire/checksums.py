"""CRC-32 of many bytes, in pieces of equal length that threads share: a cohort's messages differ tenfold in length.

What a piece adds does not depend on what comes before it: crc(A ‖ B) = L(crc(A)) ⊕ crc(B), with L linear over single
bits and the same for all B of one length.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache, reduce
from operator import xor

from ntkfl.threads import in_threads

LARGE = 2**24  # bytes of all parts, below which threads cost more than they save
PIECE = 2**19


def checksums(parts: Sequence[memoryview]) -> list[int]:
    """Of each part."""
    if sum(map(len, parts)) < LARGE:
        return [zlib.crc32(part) for part in parts]
    ends = [range(len(part) % PIECE, len(part) + 1, PIECE) for part in parts]  # the odd piece comes first
    pieces = [part[max(end - PIECE, 0) : end] for part, own in zip(parts, ends, strict=True) for end in own]
    crcs = iter(in_threads(zlib.crc32, pieces))
    return [reduce(_joined, (next(crcs) for _ in own)) for own in ends]


def _joined(before: int, piece: int) -> int:
    """L(before) ⊕ piece, by L of each of the four bytes."""
    first, second, third, fourth = _past_a_piece()
    later = first[before & 255] ^ second[before >> 8 & 255] ^ third[before >> 16 & 255] ^ fourth[before >> 24]
    return later ^ piece


@cache
def _past_a_piece() -> list[list[int]]:
    """L of every byte at each of four places, from what zlib makes of single bits before a piece of zeros."""
    zeros = bytes(PIECE)
    bits = [zlib.crc32(zeros, 1 << i) ^ zlib.crc32(zeros) for i in range(32)]
    return [
        [reduce(xor, (bits[place + i] for i in range(8) if byte >> i & 1), 0) for byte in range(256)]
        for place in (0, 8, 16, 24)
    ]
