"""Vectors that lie near a plane of few dimensions, such as the points of one smooth path, in the bytes of one of them.

    v_s ≈ o + Σ_k c_sk b_k,   k = 1 … r, r at most 4

o is the last vector, b_k are the principal directions of v_s − o, c_sk the coefficients of least error for o and b_k as
rounded. o and b_1 are rounded to 8 bits, the other directions to 4: to multiples of a step that is a block's own, such
that 127 or 7 of them are the largest magnitude of its 128 numbers. In all 29.25 bits for each of the d numbers of a
vector, however many vectors there are.

Rounding to 4 bits is off by a tenth of a direction, in no particular one: of little consequence for what vectors of
many numbers are used for, while what lies along a fifth direction would be lost whole. All errors grow with the
distance from o.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.wire.message import NamedArrays

DIRECTIONS = 4
MOST_VECTORS = 4096  # a reader makes them all, of a message that hardly grows with their number
FINE = "fine"
_COARSE, _STEPS, _COORDINATES = "coarse", "block_steps", "coordinates"
_BLOCK = 128
_PIECE = 1 << 20  # columns taken to float64 at once
_ROUNDING = 1e-12  # of the largest principal value: what is below is the rounding of others


def pack_span(vectors: Tensor) -> dict[str, Tensor]:
    """Vectors [S, d] as arrays: o and b_1 as `fine` int8 [2, d], the other directions as `coarse` uint8 [r − 1, ⌈d/2⌉]
    (two numbers per byte), `block_steps` float32 [1 + r, ⌈d/128⌉] and `coordinates` float32 [S, r]. Where S − 1 is
    smaller, so is r; of a single vector `fine` is [1, d].
    """
    if not 1 <= len(vectors) <= MOST_VECTORS:
        raise MessageError(f"{len(vectors)} vectors: from 1 to {MOST_VECTORS} can be sent at once")
    around = vectors - vectors[-1]
    values, axes = (t.flip(-1)[..., :DIRECTIONS] for t in torch.linalg.eigh(_products(around, around)))
    there = values > _ROUNDING * values[0]  # none, where all vectors are equal
    directions = (axes[:, there] / values[there].sqrt()).T.to(around) @ around  # orthonormal [r, d]
    rows = torch.cat([vectors[-1:], directions])
    levels, steps = _rounded(rows)
    sent = _multiplied(levels[1:], steps[1:])
    coordinates = (torch.linalg.pinv(_products(sent, sent)) @ _products(sent, around)).T
    fine, coarse = levels[:2].to(torch.int8), _pairs(levels[2:])
    return {FINE: fine, _COARSE: coarse, _STEPS: steps, _COORDINATES: coordinates.float()}


def unpack_span(message: NamedArrays, like: Tensor) -> Tensor:
    """The vectors [S, d] of a message, d as `like` [d] has it; in its type and on its device."""
    d = like.numel()
    fine, coarse = message.take(FINE, (None, d)), message.take(_COARSE, (None, -(-d // 2)))
    if (fine.dtype, coarse.dtype) != (torch.int8, torch.uint8):
        raise MessageError("vectors in 8 and 4 bits were expected")
    if not 1 <= len(fine) <= 2 or len(coarse) > DIRECTIONS - 1:
        raise MessageError(f"vectors along at most {DIRECTIONS} directions were expected")
    steps = message.take(_STEPS, (len(fine) + len(coarse), -(-d // _BLOCK)), like)
    coordinates = message.take(_COORDINATES, (None, len(steps) - 1), like)
    if not 1 <= len(coordinates) <= MOST_VECTORS:
        raise MessageError(f"a message of {len(coordinates)} vectors: from 1 to {MOST_VECTORS} can be sent at once")
    rows = _multiplied(torch.cat([fine.to(like), _apart(coarse.to(like.device), d).to(like)]), steps)
    return rows[0] + coordinates @ rows[1:]


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Levels −127 … 127 of the first two rows and −7 … 7 of the others, [k, d], and the blocks' steps, float32
    [k, blocks]; of a block of zeros the step is 0.
    """
    d, top = rows.shape[1], torch.full_like(rows[:, :1], 7)
    top[:2] = 127
    blocks = torch.nn.functional.pad(rows, (0, -d % _BLOCK)).view(len(rows), -(-d // _BLOCK), _BLOCK)
    steps = (blocks.abs().amax(2) / top).float()
    levels = (blocks / steps.to(rows).clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)).round_()
    return levels.flatten(1)[:, :d].clamp(-top, top), steps


def _multiplied(levels: Tensor, steps: Tensor) -> Tensor:
    """Each level times its block's step, [k, d]."""
    return levels * steps.to(levels).repeat_interleave(_BLOCK, dim=1)[:, : levels.shape[1]]


def _pairs(levels: Tensor) -> Tensor:
    """Levels −7 … 7 [k, d] as nibbles 1 … 15, the first of two in the low half, uint8 [k, ⌈d/2⌉]."""
    nibbles = (torch.nn.functional.pad(levels, (0, levels.shape[1] % 2)) + 8).to(torch.uint8)
    return nibbles[:, ::2] | (nibbles[:, 1::2] << 4)


def _apart(packed: Tensor, d: int) -> Tensor:
    """Of k rows of nibbles the levels, int16 [k, d]."""
    both = torch.stack([packed & 15, packed >> 4], dim=2).to(torch.int16)
    return both.flatten(1)[:, :d] - 8


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ in float64, on the CPU: [k, d] and [m, d] -> [k, m]."""
    pieces = zip(torch.split(a, _PIECE, dim=1), torch.split(b, _PIECE, dim=1), strict=True)
    return reduce(torch.add, (one.double() @ other.double().T for one, other in pieces)).cpu()
