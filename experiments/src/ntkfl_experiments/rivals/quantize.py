"""A vector rounded at random to a few levels, and the bits that levels become. Alistarh et al., QSGD, 2017.

A vector is sent as one norm (float32) and, for every value, a signed level of −s … s, s = 2^(bits−1) − 1:

    Q(v)_i = ‖v‖ sign(v_i) ξ_i / s,   ξ_i one of the two integers around a = s |v_i| / ‖v‖ such that E ξ_i = a.

Levels become bits at a fixed width: sign, then magnitude.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkfl.errors import MessageError, NumericalError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
Levels = NDArray[np.int32]


def top_level(bits: int) -> int:
    """s: the largest magnitude that fits beside a sign."""
    return int(2 ** (bits - 1) - 1)


def quantize(vector: Tensor, bits: int, uniforms: Floats, norm: str = "l2") -> tuple[Levels, float]:
    """Levels [n] of a vector [n] and its norm ("l2", or "max" for the largest value), rounded up to float32, so that no
    level exceeds s. `uniforms` [n] are draws from [0, 1).
    """
    values = vector.detach().cpu().double().numpy()
    if not np.isfinite(values).all():
        raise NumericalError("a vector to quantise has values that are not finite: the training diverged")
    sizes = np.abs(values)
    exact = sizes.max(initial=0.0)
    if norm == "l2" and exact > 0:  # relative to the largest value: squares neither overflow nor vanish
        exact *= np.sqrt(np.square(sizes / exact).sum())
    with np.errstate(over="ignore"):
        rounded = np.float32(exact)
    rounded = np.nextafter(rounded, np.float32(np.inf)) if rounded < exact else rounded
    if not np.isfinite(rounded):
        raise NumericalError("a vector to quantise is too large for float32: the training diverged")
    wanted = top_level(bits) * (sizes / (float(rounded) or 1.0))
    levels = np.floor(wanted)
    levels += uniforms < wanted - levels
    return np.copysign(levels, values).astype(np.int32), float(rounded)


def dequantize(levels: Levels, norm: float, bits: int) -> Tensor:
    """Q(v) [n], in float64."""
    return torch.from_numpy(norm * (levels / top_level(bits)))


def encode_levels(levels: Levels, bits: int) -> Bytes:
    """The levels' bytes, `bits` bits a value; bits to spare in the last one are zero."""
    codes = np.abs(levels) | (levels < 0).astype(np.int32) << (bits - 1)
    return np.packbits(codes[:, None] >> np.arange(bits)[::-1] & 1)


def decode_levels(data: Bytes, n: int, bits: int) -> Levels:
    """The n levels that `data` encodes; `MessageError` if it does not encode exactly that many."""
    if len(data) != -(-n * bits // 8):
        raise MessageError(f"{n} levels of {bits} bits take {-(-n * bits // 8)} bytes, not {len(data)}")
    stream = np.unpackbits(data)
    if stream[n * bits :].any():
        raise MessageError("a quantised vector has bits too many")
    codes = stream[: n * bits].reshape(n, bits) @ (1 << np.arange(bits, dtype=np.int32)[::-1])
    sign = 1 << (bits - 1)
    if (codes == sign).any():
        raise MessageError("a quantised vector has a level of minus zero")
    return np.where(codes & sign, -(codes ^ sign), codes).astype(np.int32)
