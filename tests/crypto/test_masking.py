"""Masks against ChaCha20 written out from RFC 8439, and their sums against integers without a modulus."""

from __future__ import annotations

import hashlib
import struct
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntkfl.crypto.context import bind
from ntkfl.crypto.masking import mask, pack_words, sum_masks, unpack_words
from ntkfl.crypto.row_frames import MOST_NUMBERS, Announced, BatchKey
from ntkfl.errors import MessageError
from tests.crypto.decoder import stream

SAID = Announced.of(BatchKey(3, 0), b"announced")
SEED = bytes(range(32))
RING = 1 << 32


def test_the_stream_of_the_oracle_is_that_of_the_rfc() -> None:
    """RFC 8439, A.1, test vectors 1 and 2: a key of zeros, blocks 0 and 1 of 16 words each."""
    words = list(islice(stream(bytes(32)), 32))
    assert struct.pack("<16I", *words[:16]).hex().startswith("76b8e0ada0f13d90405d6ae55386bd28")
    assert struct.pack("<16I", *words[16:]).hex().startswith("9f07e7be5551387a98ba977c732d080d")


def test_a_mask_is_the_stream_of_a_key_bound_to_the_announcement() -> None:
    key = hashlib.blake2b(bind("ntkfl mask v1", 3, 0, SAID.digest), key=SEED, digest_size=32).digest()
    assert mask(SEED, SAID, 41).tolist() == list(islice(stream(key), 41))


def test_the_protocols_test_vector() -> None:
    """As docs/protocol.md has it."""
    said = Announced(BatchKey(1, 0), bytes(range(32, 64)))
    assert [f"{word:08x}" for word in mask(SEED, said, 4)] == ["c80d6756", "28a8909b", "be1df2df", "5fcb0f21"]


OTHERS = (Announced(BatchKey(4, 0), SAID.digest), Announced(BatchKey(3, 255), SAID.digest), Announced.of(SAID.key, b""))


@pytest.mark.parametrize("said", OTHERS)
def test_another_announcement_has_another_mask(said: Announced) -> None:
    """Of 1,000 words of unrelated streams, two agree with a chance below 1e-6."""
    assert int((mask(SEED, SAID, 1000) == mask(SEED, said, 1000)).sum()) <= 1


@given(
    st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=6, unique=True),
    st.integers(1, 40),
    st.data(),
)
def test_the_sum_of_masks_takes_them_off_for_every_subset(seeds: list[bytes], count: int, data: st.DataObject) -> None:
    """Masked vectors less the masks' sum are the vectors' sum, for any clients of those that have seeds."""
    some = data.draw(st.sets(st.sampled_from(seeds), min_size=1))
    number = st.integers(-(1 << 31), (1 << 31) - 1)
    vectors = {seed: data.draw(st.lists(number, min_size=count, max_size=count)) for seed in some}
    total = np.zeros(count, dtype=np.uint32)
    for seed, vector in vectors.items():
        total += np.array([value % RING for value in vector], dtype=np.uint32) + mask(seed, SAID, count)
    total -= sum_masks(some, SAID, count)
    assert total.tolist() == [sum(column) % RING for column in zip(*vectors.values(), strict=True)]


def test_words_travel_little_endian() -> None:
    words = np.array([1, 0x01020304, RING - 1], dtype=np.uint32)
    assert pack_words(words).hex() == "0100000004030201ffffffff"
    assert np.array_equal(unpack_words(pack_words(words), 3), words)
    for data in (b"", bytes(11), bytes(13), bytes(16)):
        with pytest.raises(MessageError, match="3 numbers"):
            unpack_words(data, 3)


@pytest.mark.parametrize(("seed", "count"), [(bytes(31), 1), (bytes(33), 1), (SEED, 0), (SEED, MOST_NUMBERS + 1)])
def test_seeds_and_sizes_that_cannot_be(seed: bytes, count: int) -> None:
    with pytest.raises(MessageError, match="a mask is made of 32 bytes"):
        mask(seed, SAID, count)
