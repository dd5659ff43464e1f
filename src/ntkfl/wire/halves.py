"""Arrays in float16, each scaled by a power of two so that its largest value neither overflows nor vanishes.

A message carries them with their exponents, and `Message.take` gives the values: nothing else sees scaled numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

EXPONENTS = "exponents"
_TOP = 14  # largest values lie in [2^14, 2^15): rounding up still stays below float16's 65504
_MOST = 1100  # beyond the exponents of float64


def pack_halves(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The arrays in float16, and `exponents` [arrays] int16, in their order: value = half · 2^(exponent − 14)."""
    packed, exponents = {}, []
    for name, array in arrays.items():
        exponent = int(torch.frexp(array.abs().max()).exponent) - 1 if array.numel() else 0
        exponents.append(exponent)
        packed[name] = _scaled(array, _TOP - exponent).half()
    return packed | {EXPONENTS: torch.tensor(exponents, dtype=torch.int16)}


def unpack_half(half: Tensor, exponent: int, like: Tensor) -> Tensor:
    """The values of one array, in the type and on the device of `like`."""
    return _scaled(half.to(like), max(-_MOST, min(_MOST, exponent)) - _TOP)


def may_overflow(exponent: int, dtype: torch.dtype) -> bool:
    """Halves are below 2^16, so that only large exponents can leave the range of a type."""
    return exponent > math.frexp(torch.finfo(dtype).max)[1] - (16 - _TOP)


def _scaled(array: Tensor, exponent: int) -> Tensor:
    """array · 2^exponent, in two steps where one factor alone may be outside the range of its type."""
    if abs(exponent) < -math.frexp(torch.finfo(array.dtype).tiny)[1]:
        return array * 2.0**exponent
    half = exponent // 2
    return array * 2.0**half * 2.0 ** (exponent - half)
