"""Frames of rows: what goes in comes out, and nothing else does."""

from __future__ import annotations

import struct
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntkfl.crypto.hpke import SEAL_BYTES, SealingKey
from ntkfl.crypto.row_frames import (
    FRAME_BYTES,
    Announced,
    BatchKey,
    open_row,
    pack_rows,
    seal_rows,
    unpack_rows,
)
from ntkfl.errors import MessageError, TrustError

DIGEST = bytes(range(32))
SAID = Announced(BatchKey(3, 2), DIGEST)
keys = st.builds(BatchKey, st.integers(0, 2**32 - 1), st.integers(0, 255))
announcements = st.builds(Announced, keys, st.binary(min_size=32, max_size=32))
rows_of_one_size = st.integers(1, 40).flatmap(
    lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=1, max_size=8)
)


def flipped(data: bytes) -> list[bytes]:
    """With every bit changed, one at a time."""
    return [(int.from_bytes(data, "big") ^ 1 << bit).to_bytes(len(data), "big") for bit in range(8 * len(data))]


@given(announcements, rows_of_one_size)
def test_what_is_packed_is_unpacked(said: Announced, rows: list[bytes]) -> None:
    body = pack_rows(said, rows)
    assert len(body) == FRAME_BYTES + sum(map(len, rows))
    assert unpack_rows(body) == (said, rows)
    said_again, views = unpack_rows(memoryview(body))
    assert (said_again, [bytes(view) for view in views]) == (said, rows)


def test_every_truncation_extension_and_flipped_bit_is_refused() -> None:
    body = pack_rows(SAID, [b"abc", b"def"])
    for wrong in (*(body[:end] for end in range(len(body))), body + b"\0", *flipped(body)):
        with pytest.raises(MessageError):
            unpack_rows(wrong)


@pytest.mark.parametrize(("count", "size"), [(2**32 - 1, 1), (1, 2**32 - 1), (2**32 - 1, 2**32 - 1), (0, 6), (6, 0)])
def test_a_head_that_lies_allocates_nothing(count: int, size: int) -> None:
    body = b"NTKR" + bytes([2]) + struct.pack("<IB", 3, 2) + DIGEST + struct.pack("<II", count, size) + b"abcdef"
    tracemalloc.start()
    with pytest.raises(MessageError, match="do not make a frame"):
        unpack_rows(body + struct.pack("<I", zlib.crc32(body)))
    assert tracemalloc.get_traced_memory()[1] < 1 << 16
    tracemalloc.stop()


def test_a_row_opens_unchanged_for_its_aggregator_federation_run_and_announcement_only() -> None:
    aggregator, other = SealingKey.generate(), SealingKey.generate()
    sealed = seal_rows([b"one", b"two", b"two"], aggregator.public, "f", "r", SAID)
    assert {len(row) for row in sealed} == {3 + SEAL_BYTES}
    assert len(set(sealed)) == 3  # equal rows do not look equal
    assert [open_row(aggregator, row, "f", "r", SAID) for row in sealed] == [b"one", b"two", b"two"]
    with pytest.raises(TrustError):
        open_row(other, sealed[0], "f", "r", SAID)
    for federation, run, said in [
        ("g", "r", SAID),
        ("f", "s", SAID),
        ("f", "r", Announced(BatchKey(4, 2), DIGEST)),
        ("f", "r", Announced(BatchKey(3, 0), DIGEST)),
        ("f", "r", Announced(BatchKey(3, 2), bytes(32))),
    ]:
        with pytest.raises(TrustError):
            open_row(aggregator, sealed[0], federation, run, said)
    for changed in flipped(sealed[0]):
        with pytest.raises(TrustError):
            open_row(aggregator, changed, "f", "r", SAID)
