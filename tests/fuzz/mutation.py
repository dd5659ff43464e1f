"""Changes that make one input out of others: bits, lengths, numbers, pieces, words of the format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from tests.fuzz.target import Target

LARGEST = 1 << 17  # bytes of an input: what is found is found with small ones
_SIZES = (0, 1, 2, 127, 128, 255, 256, 32767, 65535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1)
_NUMBERS = (
    b"0", b"-1", b"1", b"256", b"2147483648", b"4294967295", b"9223372036854775808", b"-9223372036854775809", b"1e400",
    b"1e-400", b"nan", b"NaN", b"inf", b"Infinity", b"-Infinity", b"0.5", b"1.5", b"9" * 400, b"9" * 5000, b"true",
    b"null", b'"x"', b"[]", b"{}", b"1e18", b"0x7f",
)  # fmt: skip
_NUMBER = re.compile(rb"-?\d+(\.\d+)?([eE][-+]?\d+)?")
_OPENINGS = (b"[", b"{", b'{"a":', b"(", b"a.", b'"')


def mutated(rng: Random, target: Target) -> bytes:
    """A case: a seed changed one to four times, or (rarely) no seed at all."""
    if rng.random() < 0.02:
        return rng.randbytes(rng.randrange(200))
    data = rng.choice(target.seeds)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if target.twist is not None and rng.random() < 0.5:
            data = target.twist(rng, data)
        else:
            data = rng.choice(_CHANGES)(rng, data, target)
    data = data[:LARGEST]
    return data if target.repair is None else target.repair(data)


def _flip(rng: Random, data: bytes, _: Target) -> bytes:
    if not data:
        return b"\0"
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _cut(rng: Random, data: bytes, _: Target) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _drop(rng: Random, data: bytes, _: Target) -> bytes:
    at, size = rng.randrange(len(data) + 1), rng.choice((1, 4, 16, 100))
    return data[:at] + data[at + size :]


def _insert(rng: Random, data: bytes, target: Target) -> bytes:
    at = rng.randrange(len(data) + 1)
    piece = rng.choice(target.words) if target.words and rng.random() < 0.7 else rng.randbytes(rng.randrange(1, 9))
    return data[:at] + piece + data[at:]


def _repeat(rng: Random, data: bytes, _: Target) -> bytes:
    at, size = rng.randrange(len(data) + 1), rng.choice((1, 4, 16, 100))
    return data[: at + size] * rng.choice((1, 2)) + data[at : at + size] + data[at + size :]


def _splice(rng: Random, data: bytes, target: Target) -> bytes:
    other = rng.choice(target.seeds)
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def _move(rng: Random, data: bytes, _: Target) -> bytes:
    a, b, c = sorted(rng.randrange(len(data) + 1) for _ in range(3))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def _size(rng: Random, data: bytes, _: Target) -> bytes:
    """A whole number of 1 to 8 bytes replaced by one that hurts: an edge, or the input's own length and a bit."""
    width = rng.choice((1, 2, 4, 4, 8))
    value = rng.choice((*_SIZES, len(data), len(data) + rng.randrange(-40, 40))) % (1 << 8 * width)
    at = rng.randrange(max(1, len(data) - width + 1))
    return data[:at] + value.to_bytes(width, rng.choice(("little", "big"))) + data[at + width :]


def _number(rng: Random, data: bytes, target: Target) -> bytes:
    """A number in text replaced by a worse one."""
    found = list(_NUMBER.finditer(data[:20_000]))
    if not found:
        return _flip(rng, data, target)
    spot = rng.choice(found)
    return data[: spot.start()] + rng.choice(_NUMBERS) + data[spot.end() :]


def _nest(rng: Random, data: bytes, _: Target) -> bytes:
    """Brackets without end, which a parser that calls itself does not survive."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(_OPENINGS) * rng.choice((3, 300, 20_000)) + data[at:]


_BINARY = (_flip, _flip, _flip, _size, _size, _size, _cut, _drop, _insert, _repeat, _splice, _move)
_CHANGES: Sequence = (*_BINARY, _number, _nest)
