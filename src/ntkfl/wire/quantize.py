"""Vectors rounded at random to a few levels, and the bits that levels become. Alistarh et al., QSGD, 2017.

A vector is cut into buckets. Each is sent as one norm (float32) and, for every value, a signed level of −s … s:

    Q(v)_i = ‖v‖ sign(v_i) ξ_i / s,   ξ_i one of the two integers around a = s |v_i| / ‖v‖ such that E ξ_i = a.

Levels become bits at a fixed width: sign, then magnitude.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkfl.errors import MessageError, NumericalError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
Levels = NDArray[np.int32]
Norms = NDArray[np.float32]


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


def encode_levels(levels: Levels, bits: int) -> Bytes:
    """The levels' bytes, `bits` bits a value; bits to spare in the last one are zero."""
    codes = np.abs(levels) | (levels < 0).astype(np.int32) << (bits - 1)
    table = np.unpackbits(codes.astype(">u2").view(np.uint8).reshape(-1, 2), axis=1)
    return np.packbits(table[:, 16 - bits :])


def decode_levels(data: Bytes, n: int, bits: int) -> Levels:
    """The n levels that `data` encodes; `MessageError` if it does not encode exactly that many."""
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


def _check_padding(stream: Bytes, end: int) -> None:
    if len(stream) - end >= 8 or stream[end:].any():
        raise MessageError("a quantised vector has bits too many")
