"""Arrays in float16, each scaled by a power of two so that its largest value neither overflows nor vanishes.

    value = half · 2^(exponent − 14),   2^exponent ≤ max |value| < 2^(exponent + 1)

Scaling and its inverse happen where bytes are made and read; nothing else sees scaled numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ntkfl.errors import MessageError

EXPONENTS = "exponents"
_TOP = 14  # the largest value lies in [2^14, 2^15): rounding up still stays below float16's 65504
_MOST = 1100  # beyond the exponents of float64


def pack_halves(arrays: Mapping[str, Tensor], names: Collection[str]) -> Mapping[str, Tensor]:
    """The arrays, those named in float16, and behind them `exponents` int16 [names] in their order."""
    if not names:
        return arrays
    packed, exponents = dict(arrays), []
    for name, array in arrays.items():
        if name in names:
            exponent = int(torch.frexp(array.abs().max()).exponent) - 1 if array.numel() else 0
            exponents.append(exponent)
            packed[name] = _scaled(array, _TOP - exponent).half()
    return packed | {EXPONENTS: torch.tensor(exponents, dtype=torch.int16)}


def unpack_halves(arrays: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """(the arrays with every scaled half as its value in float32, the names of those)."""
    if EXPONENTS not in arrays:
        return arrays, ()
    exponents = arrays.pop(EXPONENTS)
    names = tuple(name for name, array in arrays.items() if array.dtype == torch.float16)
    if exponents.dtype != torch.int16 or exponents.shape != (len(names),):
        raise MessageError(f"{len(names)} float16 arrays and exponents of {exponents.dtype} {list(exponents.shape)}")
    for name, exponent in zip(names, exponents.tolist(), strict=True):
        arrays[name] = _scaled(arrays[name].float(), max(-_MOST, min(_MOST, exponent)) - _TOP)
    return arrays, names


def _scaled(array: Tensor, exponent: int) -> Tensor:
    """array · 2^exponent, in two steps where one factor alone may leave the range of the type."""
    if abs(exponent) < 120:
        return array * 2.0**exponent
    half = exponent // 2
    return array * 2.0**half * 2.0 ** (exponent - half)
