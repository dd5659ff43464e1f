"""Checksums in pieces are zlib's of the whole, wherever the cuts fall."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from ntkfl.wire.checksums import LARGE, PIECE, checksums


@pytest.mark.parametrize("fill", [0, LARGE], ids=["few bytes", "many bytes, in threads"])
def test_checksums_are_those_of_the_whole(fill: int) -> None:
    lengths = [0, 1, 5, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 77, fill]
    random = np.random.default_rng(0).integers(0, 256, max(*lengths, 3 * PIECE + 77), dtype=np.uint8)
    parts = [random[:length].data for length in lengths]
    assert checksums(parts) == [zlib.crc32(part) for part in parts]
    changed = random.copy()
    changed[PIECE // 2] ^= 16  # in the first, odd piece of some, in a whole one of others
    now = checksums([changed[:length].data for length in lengths])
    assert [a == b for a, b in zip(now, checksums(parts), strict=True)] == [length <= PIECE // 2 for length in lengths]
