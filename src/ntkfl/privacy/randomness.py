"""A client's randomness for one round: a key of 32 bytes, and from it one independent stream for each purpose.

A stream is SHAKE-256 of (a label, the key, the purpose, the number of a block), so nothing that one stream gives away
says anything about another, or about the key. The generators of torch and numpy are not made for this: torch's on the
CPU keeps 32 bits of its seed, and whoever tries all of them finds the noise.

**Discrete Gaussian noise** on integers, P(x) ∝ exp(−x² / 2σ²), added to a vector of integers that a record changes by
at most Δ in 2-norm, is Δ²/2σ²-concentrated differentially private (Canonne, Kamath, Steinke, The Discrete Gaussian for
Differential Privacy, NeurIPS 2020). Integers have no last bits that would give the value under the noise away, and can
be summed under a mask. A 64-bit word gives a sign and a place among 2^63. Sizes k = 0, 1, … have ⌊2^63 P(|x| = k)⌋
places each; the few places left over (about as many as there are sizes) draw again, from what rounding down took from
each size. So the probabilities are right to a factor of 1 ± 2^-51, up to 2^-53 in all, besides sizes beyond 9.5 σ
(2^-68).
"""

from __future__ import annotations

import hashlib
import math
import os
from functools import lru_cache
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from ntkfl.crypto.context import Secret, bind
from ntkfl.errors import ConfigError

Purpose = Literal["noise", "batches", "quantisation", "dropout", "rounding", "moments", "labels", "samples"]
Words = NDArray[np.uint64]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

KEY_BYTES = 32
LARGEST_SIGMA = 2.0**22  # of a table that still fits into memory
_TAIL = 9.5  # σ
_PLACES = 2.0**63
_BLOCK = 1 << 16  # words of a stream made at once: what a stream needs beside its result does not grow with it


class Randomness:
    """All that one client draws in one round. The same key gives the same draws; it never shows and is never written.

    Deployed clients make theirs with `fresh`, from the operating system; `simulated` repeats, and hides nothing.
    """

    __slots__ = ("_key", "_repeats")

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ConfigError(f"a client's randomness is {KEY_BYTES} bytes, got {len(key)}")
        self._key, self._repeats = Secret(key), False

    @classmethod
    def fresh(cls) -> Self:
        """From the operating system's generator."""
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def simulated(cls, seed: int, *labels: str | int) -> Self:
        """Of a simulation: a function of its root seed and the labels (such as client and round), and so no secret."""
        own = cls(hashlib.sha256(bind("ntkfl simulated randomness v1", str(seed), *map(str, labels))).digest())
        own._repeats = True
        return own

    def for_question(self, question: bytes) -> Randomness:
        """Other randomness for every other question: noise that two answers share would cancel in their difference.

        A simulation's stays as it is: nothing is hidden there, and weights that differ in their last bits, as between
        one process and many, are to be answered with the same noise.
        """
        if self._repeats:
            return self
        bound = bind("ntkfl randomness of a question v1", self._key.reveal(), question)
        return Randomness(hashlib.sha256(bound).digest())

    def words(self, purpose: Purpose, count: int, part: int = 0) -> Words:
        """The first `count` 64-bit words of a stream, uint64 [count]; other parts are other streams."""
        starts = enumerate(range(0, count, _BLOCK))
        blocks = [self._block(purpose, part, i, min(_BLOCK, count - start)) for i, start in starts]
        return np.frombuffer(b"".join(blocks), dtype="<u8").astype(np.uint64)

    def uniforms(self, purpose: Purpose, count: int) -> Floats:
        """Multiples of 2^-53 in [0, 1), float64 [count]. So u < p holds at least as often as p says."""
        return (self.words(purpose, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def orders(self, purpose: Purpose, times: int, count: int) -> Integers:
        """Permutations of 0 … count − 1, int64 [times, count]: the order of as many words, two of which are equal with
        a chance below count² / 2^65.
        """
        return np.argsort(self.words(purpose, times * count).reshape(times, count), axis=1, kind="stable")

    def seed(self, purpose: Purpose) -> int:
        """63 bits for a library's own generator: for draws that are no secret, and say nothing of the others."""
        return int(self.words(purpose, 1)[0] >> np.uint64(1))

    def _block(self, purpose: Purpose, part: int, number: int, words: int) -> bytes:
        bound = bind("ntkfl client randomness v1", self._key.reveal(), purpose, part, number)
        return hashlib.shake_256(bound).digest(8 * words)


def discrete_gaussians(sigma: float, count: int, randomness: Randomness, purpose: Purpose = "noise") -> Integers:
    """`count` independent draws, int64 [count]; σ ≥ 1/2."""
    if not 0.5 <= sigma <= LARGEST_SIGMA:
        raise ConfigError(
            f"noise cannot have a standard deviation of {sigma:.3g}, only 0.5 to 2^22: take a larger epsilon"
        )
    whole, rest = _tables(sigma)
    words = randomness.words(purpose, count)
    sizes = np.searchsorted(whole, words & np.uint64(2**63 - 1), side="right")
    again = np.flatnonzero(sizes == len(whole))
    if len(again):
        more = randomness.words(purpose, len(again), part=1) & np.uint64(2**63 - 1)
        sizes[again] = np.searchsorted(rest, more.astype(np.float64) / _PLACES * rest[-1], side="right")
    sizes = np.minimum(sizes, len(whole) - 1)
    return np.where(words >> np.uint64(63) == 0, sizes, -sizes)


@lru_cache(maxsize=8)
def _tables(sigma: float) -> tuple[Words, Floats]:
    """Of sizes 0, 1, …: places up to and with each, cumulated, and what rounding down left of each, cumulated."""
    k = np.arange(math.ceil(_TAIL * sigma) + 1, dtype=np.float64)
    weights = np.exp(-0.5 * (k / sigma) ** 2)
    weights[1:] *= 2  # either sign
    exact = weights * (_PLACES / math.fsum(weights))
    places = np.floor(exact).astype(np.uint64)
    left = exact - np.floor(exact)
    if (over := int(places.sum()) - 2**63) > 0:  # the sum of weights was rounded, by far less than the largest has
        places[places.argmax()] -= np.uint64(over)
    return np.cumsum(places), np.cumsum(left)
