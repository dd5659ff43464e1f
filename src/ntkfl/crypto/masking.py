"""Masks of secure sums: one ChaCha20 stream (RFC 8439) per client, as numbers modulo 2^32.

A client adds the stream of a fresh seed to its vector and gives the seed to the shuffler. The shuffler sums the streams
of the clients that it releases; who subtracts that sum from the sum of the masked vectors has the sum of the vectors,
and of a single vector nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ntkfl.crypto.context import bind
from ntkfl.crypto.row_frames import MOST_NUMBERS, SEED_BYTES, WORD_BYTES, Announced
from ntkfl.errors import MessageError
from ntkfl.extras import missing

try:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
except ImportError as error:  # the core works without; this room does not
    raise missing("a secure sum", "services") from error

Words = NDArray[np.uint32]
_WORD = np.dtype("<u4")


def mask(seed: bytes, announced: Announced, count: int) -> Words:
    """The first `count` words of the seed's stream for this announcement, uint32 [count].

    The key is BLAKE2b(round, exchange, digest of the announcement) keyed with the seed: a seed that were used for two
    announcements would still give two unrelated streams. Cost: one pass of ChaCha20 over 4 · count bytes.
    """
    if len(seed) != SEED_BYTES or not 1 <= count <= MOST_NUMBERS:
        raise MessageError(f"a mask is made of {SEED_BYTES} bytes and has 1 to {MOST_NUMBERS} numbers")
    key, digest = announced
    bound = hashlib.blake2b(bind("ntkfl mask v1", *key, digest), key=seed, digest_size=32).digest()
    stream = Cipher(algorithms.ChaCha20(bound, bytes(16)), mode=None).encryptor()
    return unpack_words(stream.update(bytes(WORD_BYTES * count)), count)


def sum_masks(seeds: Iterable[bytes], announced: Announced, count: int) -> Words:
    """The sum of the streams of all seeds modulo 2^32, uint32 [count]."""
    total = np.zeros(count, dtype=np.uint32)
    for seed in seeds:
        total += mask(seed, announced, count)  # unsigned arithmetic of numpy is that of the ring
    return total


def pack_words(words: Words) -> bytes:
    """Little-endian, 4 bytes each."""
    return words.astype(_WORD, copy=False).tobytes()


def unpack_words(data: bytes, count: int) -> Words:
    """The `count` words; `MessageError` if the data are not exactly as many."""
    if len(data) != WORD_BYTES * count:
        raise MessageError(f"{len(data)} bytes where {count} numbers of {WORD_BYTES} were expected")
    return np.frombuffer(data, dtype=_WORD).astype(np.uint32, copy=False)
