"""Masks, and their sums, against ChaCha20 written out from RFC 8439."""

from __future__ import annotations

import struct
from itertools import islice

import pytest

from ntkfl.crypto.masking import mask, sum_masks, unpack_words
from ntkfl.crypto.row_frames import MOST_NUMBERS, Announced, BatchKey
from ntkfl.errors import MessageError
from tests.crypto import decoder

SAID = Announced(BatchKey(1, 0), bytes(range(32, 64)))
SEED = bytes(range(32))


def test_the_stream_of_the_oracle_is_that_of_the_rfc() -> None:
    """RFC 8439, A.1, test vectors 1 and 2: a key of zeros, blocks 0 and 1 of 16 words each."""
    words = list(islice(decoder.stream(bytes(32)), 32))
    assert struct.pack("<16I", *words[:16]).hex().startswith("76b8e0ada0f13d90405d6ae55386bd28")
    assert struct.pack("<16I", *words[16:]).hex().startswith("9f07e7be5551387a98ba977c732d080d")


def test_masks_are_those_of_the_protocol_and_add_up_modulo_2_32() -> None:
    """The test vector of docs/protocol.md, and words of three blocks."""
    assert [f"{word:08x}" for word in mask(SEED, SAID, 4)] == ["c80d6756", "28a8909b", "be1df2df", "5fcb0f21"]
    seeds, said = [bytes([i]) * 32 for i in range(5)], decoder.Announcement({"batch": {"key": SAID.key}}, SAID.digest)
    streams = [decoder.mask(seed, said, 41) for seed in seeds]
    assert [mask(seed, SAID, 41).tolist() for seed in seeds] == streams
    assert sum_masks(seeds, SAID, 41).tolist() == [sum(column) % 2**32 for column in zip(*streams, strict=True)]


@pytest.mark.parametrize(("seed", "count"), [(bytes(31), 1), (bytes(33), 1), (SEED, 0), (SEED, MOST_NUMBERS + 1)])
def test_seeds_and_sizes_that_cannot_be(seed: bytes, count: int) -> None:
    with pytest.raises(MessageError, match="a mask is made of 32 bytes"):
        mask(seed, SAID, count)
    for data in (b"", bytes(11), bytes(13), bytes(16)):
        with pytest.raises(MessageError, match="3 numbers"):
            unpack_words(data, 3)
