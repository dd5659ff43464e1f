"""Vectors rounded at random to a few levels, and the bits that levels become. Alistarh et al., QSGD, 2017.

A vector is cut into buckets. Each is sent as one norm (float32) and, for every value, a signed level of −s … s:

    Q(v)_i = ‖v‖ sign(v_i) ξ_i / s,   ξ_i one of the two integers around a = s |v_i| / ‖v‖ such that E ξ_i = a.

Levels become bits at a fixed width (sign, then magnitude), or by Elias' recursive code ω, which spends few bits on
small numbers: one number a value (the paper's dense code), or, where most levels are zero, one for the gap to the next
that is not and one for its magnitude (the paper's sparse code); whichever is shorter. Nothing here goes value by value:
the encoder looks up all code words and scatters their bits; the decoder reads a number at every bit as if one began
there, and then follows which of them really do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkfl.errors import MessageError, NumericalError

NORMS = ("l2", "max")
CODINGS = ("fixed", "elias")

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Levels = NDArray[np.int32]
Norms = NDArray[np.float32]
Words = NDArray[np.uint64]


def top_level(bits: int) -> int:
    """s: the largest magnitude that fits beside a sign."""
    return int(2 ** (bits - 1) - 1)


def norm_count(n: int, bucket: int | None) -> int:
    """Buckets of a vector of n values."""
    return min(n, 1) if bucket is None else -(-n // bucket)


def quantize(
    vector: Tensor, bits: int, uniform: Callable[[int], Floats], norm: str = "l2", bucket: int | None = None
) -> tuple[Levels, Norms]:
    """Levels [n] and norms [buckets] of a vector [n]. Norms are rounded up to float32, so that no level exceeds s.

    `uniform(count)` draws numbers in [0, 1), [count].
    """
    values = vector.detach().cpu().double().numpy()
    if not np.isfinite(values).all():
        raise NumericalError("a vector to quantise has values that are not finite: the training diverged")
    n, buckets = len(values), norm_count(len(values), bucket)
    rows = np.zeros((buckets, bucket or n))
    rows.reshape(-1)[:n] = np.abs(values)
    exact = rows.max(axis=1, initial=0.0)
    if norm == "l2":  # relative to the largest value: squares neither overflow nor vanish
        exact *= np.sqrt(np.square(rows / np.where(exact > 0, exact, 1.0)[:, None]).sum(axis=1))
    with np.errstate(over="ignore"):
        norms = exact.astype(np.float32)
        norms = np.where(norms < exact, np.nextafter(norms, np.float32(np.inf)), norms)
    if not np.isfinite(norms).all():
        raise NumericalError("a vector to quantise is too large for float32: the training diverged")
    wanted = top_level(bits) * (rows / np.where(norms > 0, norms, 1.0).astype(np.float64)[:, None])
    levels = np.floor(wanted)
    levels += uniform(rows.size).reshape(rows.shape) < wanted - levels
    return np.copysign(levels.reshape(-1)[:n], values).astype(np.int32), norms


def dequantize(levels: Levels, norms: Norms, bits: int, bucket: int | None = None) -> Tensor:
    """Q(v) [n], in float64."""
    each = np.repeat(norms.astype(np.float64), bucket or len(levels))[: len(levels)]
    return torch.from_numpy(each * (levels / top_level(bits)))


def encode_levels(levels: Levels, bits: int, coding: str) -> Bytes:
    """The levels' bytes; bits to spare in the last one are zero."""
    return _encode_fixed(levels, bits) if coding == "fixed" else _encode_elias(levels)


def decode_levels(data: Bytes, n: int, bits: int, coding: str) -> Levels:
    """The n levels that `data` encodes; `MessageError` if it does not encode exactly that many."""
    return _decode_fixed(data, n, bits) if coding == "fixed" else _decode_elias(data, n, bits)


def _encode_fixed(levels: Levels, bits: int) -> Bytes:
    codes = np.abs(levels) | (levels < 0).astype(np.int32) << (bits - 1)
    table = np.unpackbits(codes.astype(">u2").view(np.uint8).reshape(-1, 2), axis=1)
    return np.packbits(table[:, 16 - bits :])


def _decode_fixed(data: Bytes, n: int, bits: int) -> Levels:
    if len(data) != -(-n * bits // 8):
        raise MessageError(f"{n} levels of {bits} bits take {-(-n * bits // 8)} bytes, not {len(data)}")
    stream = np.unpackbits(data)
    _check_padding(stream, n * bits)
    table = np.zeros((n, 16), dtype=np.uint8)
    table[:, 16 - bits :] = stream[: n * bits].reshape(n, bits)
    codes = np.packbits(table, axis=1).view(">u2").reshape(-1).astype(np.int32)
    sign = 1 << (bits - 1)
    if (codes == sign).any():
        raise MessageError("a quantised vector has a level of minus zero")
    return np.where(codes & sign, -(codes ^ sign), codes).astype(np.int32)


# Elias. A stream is one bit for its form; then, dense: ω(|level| + 1) and, unless zero, a sign for each value; or,
# sparse: ω(1 + how many are not zero), and for each of those ω(gap), a sign and ω(|level|).


def _encode_elias(levels: Levels) -> Bytes:
    magnitudes = np.abs(levels).astype(np.int64)
    negative = (levels < 0).astype(np.uint64)
    nonzero = np.flatnonzero(magnitudes)
    count, gaps, sizes = np.array([len(nonzero) + 1]), np.diff(nonzero, prepend=-1), magnitudes[nonzero]

    dense = elias_omega(magnitudes + 1)
    sparse = [elias_omega(numbers) for numbers in (count, gaps, sizes)]
    if sum(int(lengths.sum()) for _, lengths in sparse) < int(dense[1].sum()):  # both have the same signs besides
        (head, head_length), (gap, gap_length), (size, size_length) = sparse
        size = size | negative[nonzero] << size_length.astype(np.uint64)  # the sign stands before the magnitude
        words = np.concatenate([[np.uint64(1)], head, np.stack([gap, size], axis=1).reshape(-1)])
        lengths = np.concatenate([[1], head_length, np.stack([gap_length, size_length + 1], axis=1).reshape(-1)])
    else:
        signed = magnitudes > 0  # and here after it
        words = np.append(np.uint64(0), np.where(signed, dense[0] << np.uint64(1) | negative, dense[0]))
        lengths = np.append(np.int64(1), dense[1] + signed)
    return _scatter(words, lengths)


def _decode_elias(data: Bytes, n: int, bits: int) -> Levels:
    longest = 1 + n * (1 + int(elias_omega(np.array([top_level(bits) + 1]))[1][0]))
    if not 0 < len(data) <= -(-longest // 8):
        raise MessageError(f"{len(data)} bytes cannot be {n} Elias-coded levels")
    stream = np.unpackbits(data)
    values, ends = _omega_everywhere(data)
    if stream[0]:
        levels, end = _read_sparse(stream, values, ends, n)
    else:
        levels, end = _read_dense(stream, values, ends, n)
    _check_padding(stream, end)
    if np.abs(levels).max(initial=0) > top_level(bits):
        raise MessageError(f"a quantised vector has a level above {top_level(bits)}")
    return levels.astype(np.int32)


def _read_dense(stream: Bytes, values: Ints, ends: Ints, n: int) -> tuple[Ints, int]:
    starts, end = _follow(np.minimum(ends + (values > 1), len(ends) - 1), 1, n)
    negative = stream[np.minimum(ends[starts], len(stream) - 1)]
    magnitudes = values[starts] - 1
    return np.where((magnitudes > 0) & (negative > 0), -magnitudes, magnitudes), end


def _read_sparse(stream: Bytes, values: Ints, ends: Ints, n: int) -> tuple[Ints, int]:
    count = int(values[1]) - 1
    if count > n:
        raise MessageError(f"a quantised vector has {count} levels of {n}")
    after_sign = np.minimum(ends + 1, len(ends) - 1)
    starts, end = _follow(ends[after_sign], int(ends[1]), count)
    where = np.cumsum(values[starts]) - 1
    if count and (values[starts].max() > n or where[-1] >= n):
        raise MessageError(f"a quantised vector has a level beyond its {n} values")
    magnitudes = values[after_sign[starts]]
    levels = np.zeros(n, dtype=np.int64)
    levels[where] = np.where(stream[ends[starts]] > 0, -magnitudes, magnitudes)
    return levels, end


def elias_omega(numbers: Ints) -> tuple[Words, Ints]:
    """Elias' ω of numbers from 1 to 2^40: code words, right-aligned, and their lengths."""
    words, lengths = _small_words()
    if numbers.max(initial=0) < len(words):
        return words[numbers], lengths[numbers]
    return spell(numbers)


@functools.cache
def _small_words() -> tuple[Words, Ints]:
    words, lengths = spell(np.maximum(np.arange(1 << 16), 1))
    return words, lengths


def spell(numbers: Ints) -> tuple[Words, Ints]:
    """ω from its end: a zero; before it the number; before that one less than the number's length; until that is 1."""
    words = np.zeros(len(numbers), dtype=np.uint64)
    lengths = np.ones(len(numbers), dtype=np.int64)
    rest = numbers
    while rest.max(initial=0) > 1:
        size = np.where(rest > 1, np.frexp(rest.astype(np.float64))[1], 0).astype(np.int64)
        words |= np.where(rest > 1, rest, 0).astype(np.uint64) << lengths.astype(np.uint64)
        lengths += size
        rest = np.maximum(size - 1, 1)
    return words, lengths


def _scatter(words: Words, lengths: Ints) -> Bytes:
    """Code words one after another, as bytes."""
    ends = np.cumsum(lengths)
    shift = np.repeat(ends - 1, lengths) - np.arange(ends[-1])  # how far each bit is from its word's end
    return np.packbits((np.repeat(words, lengths) >> shift.view(np.uint64) & np.uint64(1)).astype(np.uint8))


def _omega_everywhere(data: Bytes) -> tuple[Ints, Ints]:
    """For every bit: the number whose ω begins there, and the bit after it. Both have two more entries, for the end and
    for beyond the end, where a number that is cut short or absurdly large ends too."""
    total = 8 * len(data)
    beyond = total + 1
    padded = np.concatenate([data, np.zeros(8, dtype=np.uint8)])
    triples = padded[:-8].astype(np.int32) << 16 | padded[1:-7].astype(np.int32) << 8 | padded[2:-6]
    windows = (triples[:, None] >> np.arange(8, 0, -1, dtype=np.int32) & 0xFFFF).reshape(-1)  # 16 bits from each bit on
    values, ends = np.ones(total + 2, dtype=np.int64), np.full(total + 2, beyond)
    values[:total], lengths = (table[windows] for table in _prefixes())
    ends[:total] = np.arange(total) + lengths
    _read_long(padded, np.flatnonzero(lengths == 0), values, ends)
    ends[ends > total] = beyond
    return values, ends


@functools.cache
def _prefixes() -> tuple[Ints, Ints]:
    """For every 16 bits: the number whose ω they begin with, and its length; 0 where it is longer than they are."""
    words, lengths = _small_words()
    values, sizes = np.ones(1 << 16, dtype=np.int64), np.zeros(1 << 16, dtype=np.int64)
    for number in np.flatnonzero(lengths <= 16)[1:]:
        spare = 16 - int(lengths[number])
        first = int(words[number]) << spare
        values[first : first + (1 << spare)], sizes[first : first + (1 << spare)] = number, lengths[number]
    return values, sizes


def _read_long(padded: Bytes, live: Ints, values: Ints, ends: Ints) -> None:
    """Fill in the numbers that begin at the bits `live`, a group of each a pass."""
    beyond = len(ends) - 1
    octets = np.lib.stride_tricks.sliding_window_view(padded, 8)
    at, number = live, np.ones(len(live), dtype=np.int64)
    while len(live):
        window = np.ascontiguousarray(octets[at >> 3]).view(">u8").reshape(-1).astype(np.uint64)
        window <<= (at & 7).astype(np.uint64)  # the 57 bits or more from here on
        more = window >> np.uint64(63) == 1
        values[live[~more]], ends[live[~more]] = number[~more], at[~more] + 1
        fits = (number < 40) & (at + number < beyond - 1)
        ends[live[more & ~fits]] = beyond
        go = more & fits
        live, at, number, window = live[go], at[go], number[go], window[go]
        number, at = (window >> (63 - number).astype(np.uint64)).astype(np.int64), at + number + 1


def _follow(successor: Ints, start: int, count: int) -> tuple[Ints, int]:
    """start, successor[start], … : `count` of them, and the one after.

    Jumps of 2, 4, 8 … steps are made for all bits at once; only every 32nd step is then taken singly, and those between
    are filled in by ever shorter jumps.
    """
    beyond = len(successor) - 1
    if count > beyond:
        raise MessageError("a quantised vector ends too early")
    jumps = [successor]
    for _ in range(5):
        jumps.append(jumps[-1][jumps[-1]])
    at, coarse = start, []
    for _ in range(count // 32 + 1):
        coarse.append(at)
        at = int(jumps[5][at])
    path = np.array(coarse)[:, None]
    for jump in reversed(jumps[:5]):
        path = np.stack([path, jump[path]], axis=2).reshape(len(path), -1)
    path = path.reshape(-1)
    if path[count] == beyond:
        raise MessageError("a quantised vector ends too early")
    return path[:count], int(path[count])


def _check_padding(stream: Bytes, end: int) -> None:
    if len(stream) - end >= 8 or stream[end:].any():
        raise MessageError("a quantised vector has bits too many")
