"""Changes to messages that know what a message is: arrays dropped, renamed, reshaped, recast, filled with extremes."""

from __future__ import annotations

import json
import struct
import zlib
from random import Random

import tomli_w
import torch

from ntkfl.errors import NTKFLError
from ntkfl.safe_parse import parse_toml
from ntkfl.wire.container import pack, unpack

_VALUES: tuple[object, ...] = (
    None, True, 0, -1, 3, 2**31, 2**63, 10**400, 1.5, -0.0, 1e300, float("inf"), float("nan"), "", "x", "../..", "a\0b",
    "9" * 30, [], {}, [[]], [0], [-1], ["x"], [1e300], {"x": 1}, {"self": 1}, {"name": []}, [None, 2],
)  # fmt: skip
_EXTREMES = (0.0, -1.0, 1.0, 1e-45, 3e38, -3e38, float("nan"), float("inf"), 1e300, 255.0, 2.0**31, -(2.0**63), 2.0**62)
_TYPES = (torch.float32, torch.float64, torch.float16, torch.uint8, torch.int8, torch.int32, torch.int64)


def sealed_again(data: bytes) -> bytes:
    """With a CRC-32 that fits: what an attacker sends, who can count."""
    return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4])) if len(data) > 4 else data


def twisted(rng: Random, data: bytes) -> bytes:
    """A message with one array changed, where it is one; else as it was."""
    try:
        kind, round, arrays = unpack(data)
    except NTKFLError:
        return data
    if not arrays:
        return data
    name = rng.choice(sorted(arrays))
    array = arrays[name]
    match rng.randrange(8):
        case 0:
            del arrays[name]
        case 1:
            arrays[rng.choice([*sorted(arrays), "0.layer", "0.values", "statistics", "x"])] = arrays.pop(name)
        case 2:
            arrays[name] = array.reshape(_shape(rng, array.numel()))
        case 3 if array.ndim:
            arrays[name] = torch.cat([array] * rng.randrange(1, 4)) if rng.random() < 0.5 else array[: rng.randrange(3)]
        case 4:
            with torch.no_grad():
                arrays[name] = array.nan_to_num().to(rng.choice(_TYPES))
        case 5 if array.numel():
            flat = array.clone().reshape(-1)
            value = rng.choice(_EXTREMES)
            if array.is_floating_point():
                flat[rng.randrange(len(flat))] = torch.tensor(value, dtype=torch.float64).to(array.dtype)
            else:
                limits = torch.iinfo(array.dtype)
                whole = 0 if value != value else int(min(max(value, limits.min), limits.max))
                flat[rng.randrange(len(flat))] = whole
            arrays[name] = flat.reshape(array.shape)
        case 6:
            arrays[name] = torch.empty(_hollow(rng), dtype=array.dtype)
        case _:
            round, kind = rng.choice((0, 1, 2, 2**32 - 1, round)), rng.choice((0, 1, 3, 4, 7, kind, kind))
    try:
        return pack(kind, round, arrays)
    except (ValueError, struct.error):  # a shape that even nothing cannot have
        return data


def _shape(rng: Random, count: int) -> list[int]:
    divisors = [d for d in range(1, min(count, 64) + 1) if count % d == 0]
    first = rng.choice(divisors or [1])
    return rng.choice(
        ([count], [first, count // first], [count // first, first], [1, count], [count, 1, 1], [1] * 5 + [count])
    )


def _hollow(rng: Random) -> list[int]:
    """A shape without numbers in it, which costs nothing to send, however large its other sides."""
    sides = [0, *(rng.choice((0, 1, 3, 1 << 20, (1 << 31) - 1)) for _ in range(rng.randrange(3)))]
    rng.shuffle(sides)
    return sides


def twisted_json(rng: Random, data: bytes) -> bytes:
    """A JSON document with one value replaced, removed or added; a file of lines, in one of them."""
    try:
        lines = data.decode().split("\n")
        at = rng.randrange(len(lines))
        whole = "\n".join(lines) if data[:1] in b"{[" and len(lines) > 1 and lines[0].strip() in "{[" else None
        document = json.loads(whole if whole is not None else lines[at])
        _twist_document(rng, document)
        text = json.dumps(document)
        return text.encode() if whole is not None else "\n".join([*lines[:at], text, *lines[at + 1 :]]).encode()
    except (ValueError, RecursionError):
        return data


def twisted_toml(rng: Random, data: bytes) -> bytes:
    """A TOML document with one value replaced, removed or added."""
    try:
        document = parse_toml(data.decode())  # not tomllib: an earlier change may have made it endless
        _twist_document(rng, document)
        return tomli_w.dumps(document).encode()
    except (ValueError, TypeError, RecursionError, AttributeError):
        return data


def _twist_document(rng: Random, document: object) -> None:
    holders: list[dict[str, object] | list[object]] = []
    open_ = [document]
    while open_:
        here = open_.pop()
        if isinstance(here, dict | list):
            holders.append(here)
            open_ += here.values() if isinstance(here, dict) else here[:20]
    if not holders:
        return
    holder = rng.choice(holders)
    value = rng.choice(_VALUES)
    if isinstance(holder, list):
        holder.append(value) if not holder or rng.random() < 0.3 else holder.__setitem__(
            rng.randrange(len(holder)), value
        )
    elif holder and rng.random() < 0.2:
        del holder[rng.choice(sorted(holder))]
    else:
        holder[rng.choice([*sorted(holder), *sorted(holder), "self", "name", "new"])] = value
