"""idx files: read exactly, or refused in one line."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest

from ntkfl.data.mnist import IdxFile
from ntkfl.errors import DataError

ARRAY = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
RAW = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in ARRAY.shape) + ARRAY.tobytes()


def published(raw: bytes = RAW) -> IdxFile:
    return IdxFile("some-idx3-ubyte", (2, 3, 4), hashlib.sha256(raw).hexdigest())


def test_any_compression_of_the_content_is_accepted(tmp_path: Path) -> None:
    for folder, name, content in (
        ("plain", "some-idx3-ubyte", RAW),
        ("fast", "some-idx3-ubyte.gz", gzip.compress(RAW, 1, mtime=0)),
        ("dated", "some-idx3-ubyte.gz", gzip.compress(RAW, 9, mtime=1591315200)),
        ("misnamed", "some-idx3-ubyte.gz", RAW),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(content)
        np.testing.assert_array_equal(published().read(tmp_path / folder), ARRAY)


def test_another_content_of_the_same_shape_is_refused(tmp_path: Path) -> None:
    (tmp_path / "some-idx3-ubyte").write_bytes(RAW[:-1] + b"\xff")
    with pytest.raises(DataError, match="not the published content") as caught:
        published().read(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_damage_to_a_compressed_file_goes_unnoticed(tmp_path: Path) -> None:
    packed = gzip.compress(RAW, mtime=0)
    path = tmp_path / "some-idx3-ubyte.gz"
    for length in range(len(packed)):
        path.write_bytes(packed[:length])
        with pytest.raises(DataError):
            published().read(tmp_path)
    refused = 0
    for bit in range(8 * 10, 8 * len(packed)):  # beyond the gzip header, which says nothing of the content
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            np.testing.assert_array_equal(published().read(tmp_path), ARRAY)  # a bit that only pads
        except DataError:
            refused += 1
    assert refused >= 8 * (len(packed) - 10) - 7


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"some-idx3-ubyte\[.gz\] is missing"):
        published().read(tmp_path)
