"""Rows of k kept values out of n, as bytes: the codec of top-k sparsification.

Every row of given (n, k, value type) takes the same number of bytes whatever it holds, so sizes say nothing about data.

**Positions**: p_0 < p_1 < … < p_{k−1} < n, by Elias and Fano's code, which takes about half a bit a position more than
the least any code of one length can (for k ≤ n/10). With l = ⌊log2(n/k)⌋ (the largest l with k·2^l ≤ n), a row is a
stream of B = k·l + k + h bits, h = ⌊(n−1)/2^l⌋:

    low    k·l bits: for i = 0 … k−1 the l low bits of p_i, the least significant first: bit i·l + j is bit j of p_i
    high   k + h bits, of which exactly k are ones: for each i, bit k·l + ⌊p_i/2^l⌋ + i

Bit b of the stream is bit b mod 8 of byte ⌊b/8⌋, bit 0 being the least significant. The ⌈B/8⌉ bytes of a row are filled
up with zero bits. A set of positions has exactly one such row.

**Values**: k a row, in the order of the positions, little-endian, rounded to float32 first.

    float32   as they are, 4 bytes each; no scale
    8bit      one byte each: bit 7 the sign (1: negative), bits 0 to 6 a magnitude code c; two scales a row (float32),
              lo and hi, the least and the largest magnitude that is not zero: c = 0 is exactly zero (then bit 7 is 0),
              c = 1 … 127 is lo·(hi/lo)^((c−1)/126), computed in float64 and rounded to float32; c = 1 is lo and c = 127
              is hi exactly. A row of zeros has lo = hi = 0; where lo = hi, c is 0 or 1

Relative error, at most: float32 2^−24; 8bit (hi/lo)^(1/252) − 1, half a step of the logarithm: 0.9 % for hi/lo = 10,
1.8 % for 100, 2.8 % for 1,000 (and float32 rounding).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError, NotFinite, NumericalError, unknown
from ntkfl.tangent.jacobian import Jacobian
from ntkfl.tangent.sparse import SparseBlock
from ntkfl.wire.jacobians import check_network
from ntkfl.wire.message import NamedArrays

# How values travel: their type on the wire, and how many scales a row has.
VALUES = {"float32": (torch.float32, 0), "8bit": (torch.uint8, 2)}

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

_TOP = 127  # the largest magnitude code


def topk_bytes(n: int, k: int, values_as: str = "8bit") -> int:
    """Bytes of a row: positions, values and scales."""
    kind, scales = _kind(values_as)
    return -(-_bits(n, k)[1] // 8) + k * kind.itemsize + 4 * scales


def encode_topk(values: Tensor, positions: Tensor, size: int, values_as: str = "8bit") -> dict[str, Tensor]:
    """values [N, k] at positions [N, k] < size, increasing along rows -> positions uint8 [N, bytes], values [N, k],
    and for 8bit scale [N, 2]. All on the CPU; N is at least 1."""
    kind, _ = _kind(values_as)
    if values.ndim != 2 or values.shape != positions.shape or not len(values) or not 0 < values.shape[1] <= size:
        raise MessageError(
            f"values {list(values.shape)} and positions {list(positions.shape)} are no rows of at most {size} values"
        )
    where: Ints = positions.detach().cpu().long().numpy()
    _check_positions(where, size)
    with np.errstate(over="ignore", under="ignore"):  # a value too small for float32 rounds to zero
        numbers: Floats = values.detach().cpu().numpy().astype(np.float32)
    if not np.isfinite(numbers).all():
        raise NumericalError("a row to send has values that are not finite in float32: the training diverged")
    arrays = {"positions": torch.from_numpy(np.stack([_spell(row, size) for row in where]))}
    if kind == torch.float32:
        return arrays | {"values": torch.from_numpy(numbers)}
    codes, scales = zip(*map(_to_codes, numbers), strict=True)
    return arrays | {"values": torch.from_numpy(np.stack(codes)), "scale": torch.from_numpy(np.stack(scales))}


def decode_topk(
    arrays: Mapping[str, Tensor], size: int, k: int, values_as: str = "8bit", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """(values [N, k] in `dtype`, positions [N, k] int64) of what `encode_topk` made; `MessageError` for all else."""
    kind, scales = _kind(values_as)
    expected = {"positions": (torch.uint8, -(-_bits(size, k)[1] // 8)), "values": (kind, k)}
    if scales:
        expected["scale"] = (torch.float32, scales)
    if set(arrays) != set(expected):
        raise MessageError(f"top-k rows consist of {', '.join(expected)}; got {', '.join(sorted(arrays)) or 'nothing'}")
    rows = len(arrays["values"]) if arrays["values"].ndim else 0
    for name, (wanted, width) in expected.items():
        array = arrays[name]
        if not rows or array.dtype != wanted or array.shape != (rows, width):
            raise MessageError(
                f"{name!r} of top-k rows must be {wanted} [{rows}, {width}], not {array.dtype} {list(array.shape)}"
            )
        if array.is_floating_point() and not bool(array.isfinite().all()):
            raise NotFinite(f"{name!r} of top-k rows has values that are not finite")
    where = np.stack([_read(row, size, k) for row in arrays["positions"].cpu().numpy()])
    _check_positions(where, size)
    numbers = arrays["values"].cpu().numpy()
    if scales:
        numbers = np.stack([_from_codes(*row) for row in zip(numbers, arrays["scale"].cpu().numpy(), strict=True)])
    return torch.from_numpy(numbers).to(dtype), torch.from_numpy(where)


def pack_topk(J: Jacobian, values_as: str = "8bit") -> dict[str, Tensor]:
    """A sparsified Jacobian as arrays of a message."""
    if len(J.blocks) != 1 or not isinstance(J.blocks[0], SparseBlock):
        raise MessageError("only a sparsified Jacobian travels as top-k rows: call sparsify first")
    block = J.blocks[0]
    coded = encode_topk(block.values, block.positions, J.shape[1] * J.shape[2], values_as)
    arrays = {"jacobian": torch.tensor(J.shape[1:], dtype=torch.int64)}
    return arrays | {f"topk.{name}": array for name, array in coded.items()}


def unpack_topk(message: NamedArrays, outputs: int, columns: int, k: int, values_as: str, like: Tensor) -> Jacobian:
    """The sparsified Jacobian in an upload, checked against the network's (d2, d) and the run's k."""
    check_network(message, outputs, columns)
    arrays = {name.removeprefix("topk."): a for name, a in message.arrays.items() if name.startswith("topk.")}
    values, positions = decode_topk(arrays, outputs * columns, k, values_as, like.dtype)
    block = SparseBlock(values.to(like.device), positions.to(like.device), outputs, columns)
    return Jacobian([block], outputs, columns)


def _kind(values_as: str) -> tuple[torch.dtype, int]:
    if values_as not in VALUES:
        raise unknown("kind of values", values_as, VALUES)
    return VALUES[values_as]


# Positions, row by row.


def _bits(n: int, k: int) -> tuple[int, int]:
    """(l, B): low bits of a position, bits of a row."""
    if not 0 < k <= n:
        raise ConfigError(f"a row of {n} values cannot keep {k} of them")
    low = (n // k).bit_length() - 1
    return low, k * low + k + ((n - 1) >> low)


def _spell(positions: Ints, n: int) -> Bytes:
    """The bytes of positions [k]."""
    k = len(positions)
    low, bits = _bits(n, k)
    stream = np.zeros(bits, dtype=np.uint8)
    stream[: k * low] = (positions[:, None] >> np.arange(low) & 1).reshape(-1)
    stream[k * low + (positions >> low) + np.arange(k)] = 1
    return np.packbits(stream, bitorder="little")


def _read(data: Bytes, n: int, k: int) -> Ints:
    """The inverse of `_spell`; whether positions increase and are below n is left to check."""
    low, bits = _bits(n, k)
    stream = np.unpackbits(data, bitorder="little")
    if stream[bits:].any():
        raise MessageError("top-k positions have bits too many")
    found = np.flatnonzero(stream[k * low : bits])  # the i-th one is ⌊p_i/2^l⌋ + i
    if len(found) != k:
        raise MessageError(f"a row of top-k positions does not name {k} of them")
    below = stream[: k * low].reshape(k, low).astype(np.int64) << np.arange(low)
    positions: Ints = (found - np.arange(k) << low) + below.sum(1)
    return positions


def _check_positions(positions: Ints, n: int) -> None:
    increasing = (positions[:, 1:] > positions[:, :-1]).all()
    if not increasing or positions[:, 0].min() < 0 or positions[:, -1].max() >= n:
        raise MessageError(f"top-k positions must increase strictly from 0 to below {n}")


# Values, row by row.


def _to_codes(values: Floats) -> tuple[Bytes, Floats]:
    """Codes [k] and scales [2] of values [k]."""
    magnitudes = np.abs(values)
    some = magnitudes > 0
    if not some.any():
        return np.zeros(len(values), dtype=np.uint8), np.zeros(2, dtype=np.float32)
    scale = np.array([magnitudes[some].min(), magnitudes.max()])
    logs = np.log(np.where(some, magnitudes, np.float32(1)).astype(np.float64))
    bottom, top = np.log(scale.astype(np.float64))
    codes = 1 + np.rint((logs - bottom) * ((_TOP - 1) / (top - bottom if top > bottom else 1)))
    codes = np.where(some, codes, 0) + np.where(values < 0, _TOP + 1, 0)
    return codes.astype(np.uint8), scale


def _from_codes(codes: Bytes, scale: Floats) -> Floats:
    """The inverse of `_to_codes`, but for rounding."""
    lo, hi = scale.astype(np.float64)
    if lo < 0 or lo > hi or (lo == 0 and hi > 0):
        raise MessageError("the scales of top-k values are no least and largest magnitude")
    # The largest code that a row may use: none but zero without magnitudes, one where all are equal.
    most = 0 if hi == 0 else 1 if lo == hi else _TOP
    if (codes == _TOP + 1).any() or ((codes & _TOP) > most).any():
        raise MessageError("a top-k value has a code that means nothing")
    # A table of all codes: 127 powers instead of k. Both ends round to lo and hi exactly.
    ratio = hi / lo if hi > 0 else 1.0
    magnitudes = (lo * ratio ** (np.arange(_TOP) / (_TOP - 1))).astype(np.float32)
    table = np.concatenate([[np.float32(0)], magnitudes, [np.float32(0)], -magnitudes])
    return table[codes]
