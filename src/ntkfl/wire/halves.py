"""Arrays in float16, each scaled by a power of two so that its largest value neither overflows nor vanishes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ntkfl.errors import NotFinite
from ntkfl.wire.message import Message

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


def unpack_halves(message: Message, names: Collection[str], like: Tensor) -> dict[str, Tensor]:
    """The named arrays of a message in the type and on the device of `like`; names in the order they were packed."""
    exponents = message.take(EXPONENTS, (len(names),)).long().clamp(-_MOST, _MOST).tolist()
    arrays = {
        name: _scaled(message.take(name, None, like), int(exponent) - _TOP)
        for name, exponent in zip(names, exponents, strict=True)
    }
    # Halves are below 2^16, and `take` found them finite: only large exponents need a look at every number.
    within = math.frexp(torch.finfo(like.dtype).max)[1] - (16 - _TOP)
    for (name, array), exponent in zip(arrays.items(), exponents, strict=True):
        if exponent > within and not bool(array.isfinite().all()):
            raise NotFinite(f"{name!r} in a {message.kind!r} message has values that are not finite")
    return arrays


def _scaled(array: Tensor, exponent: int) -> Tensor:
    """array · 2^exponent, in two steps where one factor alone may be outside the range of its type."""
    if abs(exponent) < -math.frexp(torch.finfo(array.dtype).tiny)[1]:
        return array * 2.0**exponent
    half = exponent // 2
    return array * 2.0**half * 2.0 ** (exponent - half)
