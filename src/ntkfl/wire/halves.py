"""Arrays in float16, each scaled by a power of two so that its largest value neither overflows nor vanishes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ntkfl.errors import NotFinite
from ntkfl.wire.message import Message

EXPONENTS = "exponents"
_TOP = 14  # largest values lie in [2^14, 2^15): rounding up still stays below float16's 65504
_MOST = 1100  # beyond the exponents of float64


def pack_halves(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The arrays in float16, and `exponents` [arrays] int16, in their order: value = half · 2^(exponent − 14)."""
    return pack_halves_together({name: array.unsqueeze(0) for name, array in arrays.items()})[0]


def pack_halves_together(arrays: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """`pack_halves` of each of several messages, from arrays [messages, …], on their device, waited for once."""
    messages = len(next(iter(arrays.values())))
    some = [array.flatten(1).abs().amax(1) if array.numel() else array.new_zeros(messages) for array in arrays.values()]
    exponents = torch.frexp(torch.stack(some).cpu()).exponent - 1
    exponents[[not array.numel() for array in arrays.values()]] = 0
    halves = [_scaled_each(t, _TOP - e).half() for t, e in zip(arrays.values(), exponents, strict=True)]
    told = exponents.to(torch.int16).T.contiguous()
    return [
        {name: array[i] for name, array in zip(arrays, halves, strict=True)} | {EXPONENTS: told[i]}
        for i in range(messages)
    ]


def unpack_halves_together(message: Message, names: Collection[str], like: Tensor) -> dict[str, Tensor]:
    """`unpack_halves` of several messages as one, whose arrays are [messages, …]: arrays [messages, …]."""
    exponents = message.take(EXPONENTS, (None, len(names))).cpu().long().clamp(-_MOST, _MOST)
    arrays = {}
    for name, own in zip(names, exponents.T, strict=True):
        arrays[name] = _scaled_each(message.take(name, None, like), own - _TOP)
    if _may_overflow(int(exponents.max()), like.dtype) and not all(bool(t.isfinite().all()) for t in arrays.values()):
        raise NotFinite(f"an array in a {message.kind!r} message has values that are not finite")
    return arrays


def unpack_halves(message: Message, names: Collection[str], like: Tensor) -> dict[str, Tensor]:
    """The named arrays of a message in the type and on the device of `like`; names in the order they were packed."""
    one = replace(message, arrays={name: array.unsqueeze(0) for name, array in message.arrays.items()})
    return {name: array[0] for name, array in unpack_halves_together(one, names, like).items()}


def _scaled_each(array: Tensor, exponents: Tensor) -> Tensor:
    """array[i] · 2^exponents[i] for each i, in two steps: either factor is in the range of the type."""
    shape = (-1,) + (1,) * (array.ndim - 1)
    for part in (exponents // 2, exponents - exponents // 2):
        # Powers made on the CPU are exact; a GPU's `exp2` need not be.
        array = array * torch.ldexp(torch.ones(len(part), dtype=torch.float64), part).to(array).view(shape)
    return array


def _may_overflow(exponent: int, dtype: torch.dtype) -> bool:
    """Halves are below 2^16, and `take` found them finite: only large exponents need a look at every number."""
    return exponent > math.frexp(torch.finfo(dtype).max)[1] - (16 - _TOP)
