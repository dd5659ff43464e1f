"""Secure sums: clients send masked vectors, and the aggregator learns their total and nothing else.

    client       round(scale · addends) + ChaCha20(seed)  ─► sealed to the aggregator;  seed ─► shuffler
    shuffler     Σ ChaCha20(seed) over the clients released, once; the seeds are deleted
    aggregator   Σ masked − Σ masks = Σ round(scale · addends)  modulo 2^32

`mask_reply` is a client's side and `open_sum` the aggregator's; the shuffler's is `crypto.masking.sum_masks`.

Numbers of at most `limit` become whole multiples of 1/scale, rounded up or down at random so that the expectation is
the number itself. The scale is the largest power of two with which the sum of `clients` such numbers stays below 2^31:
nothing wraps, and whole numbers stay exact where the scale is at least 1.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkfl.crypto.hpke import SEAL_BYTES, SealingKey
from ntkfl.crypto.masking import Words, mask, pack_words, unpack_words
from ntkfl.crypto.row_frames import SEED_BYTES, WORD_BYTES, Announced, open_row, pack_rows, seal_rows
from ntkfl.errors import ConfigError, MessageError, NumericalError, TrustError
from ntkfl.methods.replies import Addend, Addends
from ntkfl.privacy.randomness import Randomness

Floats = NDArray[np.float64]
_MOST = (1 << 31) - 1  # the largest sum that two's complement holds
_BOUNDED = "bounded"  # summed besides: 1 of a client that had to scale a part down to its limit, few samples or many


def scale_of(limit: float, clients: int) -> float:
    """2^e for the largest e with clients · ⌈limit · 2^e⌉ < 2^31."""
    if not (math.isfinite(limit) and limit > 0 and clients >= 1):
        raise ConfigError(f"fixed point needs a limit above 0 and at least one client, got {limit} and {clients}")
    each = _MOST // clients
    if each < 1:
        raise ConfigError(f"{clients} clients are more than a sum of 32 bits has room for")
    exponent = math.frexp(each / limit)[1]
    while math.ceil(math.ldexp(limit, exponent)) > each:
        exponent -= 1
    return math.ldexp(1.0, exponent)


def fit(values: Floats, limit: float) -> tuple[Floats, bool]:
    """The values, scaled down together where one is larger than the limit, and whether they were. [n]"""
    if not bool(np.isfinite(values).all()):
        raise NumericalError("a reply with values that are not finite cannot be summed; this client leaves the round")
    largest = float(np.abs(values).max(initial=0.0))
    if largest <= limit:
        return values, False
    return np.clip(values * (limit / largest), -limit, limit), True


def to_words(values: Floats, scales: Floats, uniforms: Floats) -> Words:
    """⌊values · scales⌋ or one more, the latter with the probability of what the rounding down leaves; modulo 2^32.

    `uniforms` in [0, 1), multiples of 2^-53, decide. All [n].
    """
    scaled = values * scales  # exact: scales are powers of two
    down = np.floor(scaled)
    whole = down.astype(np.int64) + (uniforms < scaled - down)
    return (whole & 0xFFFFFFFF).astype(np.uint32)


def from_words(total: Words, scales: Floats) -> Floats:
    """The sum that the words stand for, as signed numbers, [n]."""
    return total.view(np.int32).astype(np.float64) / scales


@dataclass(frozen=True)
class SumSchema:
    """What every client's vector looks like, for sums of at most `clients` clients: (name, shape, limit) of each array,
    in their order. The first number says whether the client had to scale something down, unless only clients of many
    samples ever have to.
    """

    parts: tuple[tuple[str, tuple[int, ...], float], ...]
    clients: int

    @staticmethod
    def of(addends: Addends, clients: int) -> SumSchema:
        """From any honest reply's addends, such as those of a blank one."""
        told = [] if all(part.by_samples for part in addends.values()) else [(_BOUNDED, Addend(torch.zeros(()), 1.0))]
        parts = [*told, *sorted(addends.items())]
        return SumSchema(tuple((name, tuple(part.values.shape), part.limit) for name, part in parts), clients)

    @property
    def sizes(self) -> list[int]:
        """Numbers of each array."""
        return [math.prod(shape) for _, shape, _ in self.parts]

    @property
    def numbers(self) -> int:
        """Length of a client's vector."""
        return sum(self.sizes)

    @property
    def sealed_bytes(self) -> int:
        """Size of a masked vector once it is sealed: equal for all clients."""
        return WORD_BYTES * self.numbers + SEAL_BYTES

    def rows(self, of_samples: int) -> int:
        """One vector per client, however many samples it has."""
        return 1

    def scales(self) -> Floats:
        """What each number is multiplied by, [numbers]."""
        return np.repeat([scale_of(limit, self.clients) for _, _, limit in self.parts], self.sizes)

    def encode(self, addends: Addends, randomness: Randomness) -> Words:
        """The addends as integers modulo 2^32, [numbers]; those beyond their limit are scaled down to it."""
        parts, bounded = list[Floats](), False
        for _, part in sorted(addends.items()):
            values, was = fit(part.values.double().numpy().reshape(-1), part.limit)
            parts.append(values)
            bounded |= was and not part.by_samples
        if len(parts) < len(self.parts):
            parts.insert(0, np.array([float(bounded)]))
        return to_words(np.concatenate(parts), self.scales(), randomness.uniforms("rounding", self.numbers))

    def decode(self, total: Words, clients: int) -> tuple[dict[str, Tensor], int]:
        """(the sums by name, float64; how many clients were bounded) of the total of `clients` clients.

        `MessageError` where a number is larger than that many clients that keep to the limits can make it.
        """
        scales = self.scales()
        values = from_words(total, scales)
        limits = np.repeat([limit for _, _, limit in self.parts], self.sizes)
        if not bool((np.abs(values) <= clients * limits + clients / scales).all()):
            raise MessageError("a sum beyond what its clients' limits allow: one of them did not keep to its own")
        pieces = torch.split(torch.from_numpy(values), self.sizes)
        sums = {name: piece.view(shape) for (name, shape, _), piece in zip(self.parts, pieces, strict=True)}
        return sums, round(float(sums.pop(_BOUNDED, 0.0)))


def mask_reply(words: Words, aggregator: bytes, federation: str, run: str, announced: Announced) -> bytes:
    """A client's submission: the seed of its mask, for the shuffler, and its masked vector in a frame of one row,
    sealed to the aggregator. Seeds are the operating system's, and used once.
    """
    seed = os.urandom(SEED_BYTES)
    masked = words + mask(seed, announced, len(words))
    return seed + pack_rows(announced, seal_rows([pack_words(masked)], aggregator, federation, run, announced))


def open_sum(
    schema: SumSchema,
    sealed: Sequence[bytes],
    masks: bytes,
    opener: SealingKey,
    federation: str,
    run: str,
    announced: Announced,
) -> tuple[dict[str, Tensor], int]:
    """The aggregator's side: (the sums by name, float64; how many clients had to scale something down).

    `MessageError` where one vector does not open or has another size: its mask is part of the masks' sum, so without
    it there is no sum at all.
    """
    total = np.zeros(schema.numbers, dtype=np.uint32)
    try:
        for row in sealed:
            total += unpack_words(open_row(opener, row, federation, run, announced), schema.numbers)
    except (TrustError, MessageError) as error:
        raise MessageError(f"a client's masked vector cannot be read, and the sum not without it: {error}") from None
    total -= unpack_words(masks, schema.numbers)
    return schema.decode(total, len(sealed))
