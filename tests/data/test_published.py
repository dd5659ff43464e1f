"""Published files: read exactly, or refused in one line; archives of arrays that anybody may have made."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ntkfl.data import published
from ntkfl.data.published import read_npz
from ntkfl.errors import DataError
from tests.data.conftest import idx_bytes

# --- idx

ARRAY = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
RAW = idx_bytes(ARRAY)
NAME = "some-idx3-ubyte"


def read(folder: Path) -> np.ndarray:
    return published._read_idx(folder, NAME, hashlib.sha256(RAW).hexdigest())


def test_any_compression_of_the_content_is_accepted(tmp_path: Path) -> None:
    for folder, name, content in (
        ("plain", NAME, RAW),
        ("fast", f"{NAME}.gz", gzip.compress(RAW, 1, mtime=0)),
        ("dated", f"{NAME}.gz", gzip.compress(RAW, 9, mtime=1591315200)),
        ("misnamed", f"{NAME}.gz", RAW),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(content)
        np.testing.assert_array_equal(read(tmp_path / folder), ARRAY)


def test_another_content_of_the_same_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"some-idx3-ubyte\[.gz\] is missing"):
        read(tmp_path)
    (tmp_path / NAME).write_bytes(RAW[:-1] + b"\xff")
    with pytest.raises(DataError, match="not the published content") as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_damage_to_a_compressed_file_goes_unnoticed(tmp_path: Path) -> None:
    packed = gzip.compress(RAW, mtime=0)
    path = tmp_path / f"{NAME}.gz"
    for length in range(len(packed)):
        path.write_bytes(packed[:length])
        with pytest.raises(DataError):
            read(tmp_path)
    refused = 0
    for bit in range(8 * 10, 8 * len(packed)):  # beyond the gzip header, which says nothing of the content
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            np.testing.assert_array_equal(read(tmp_path), ARRAY)  # a bit that only pads
        except DataError:
            refused += 1
    assert refused >= 8 * (len(packed) - 10) - 7


# --- .npz archives


def npy(header: str, data: bytes = b"") -> bytes:
    """A .npy file with a header of one's choosing."""
    padded = header.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode() + data


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (npy("{'descr': '|u1', 'fortran_order': False, 'shape': (4000000000, 4000), }", bytes(8)), "cannot be read"),
        (npy("{'descr': '|O', 'fortran_order': False, 'shape': (1, 1), }", bytes(8)), "Object arrays cannot be loaded"),
        (npy("{'descr': '<M8[D]', 'fortran_order': False, 'shape': (1,), }", bytes(8)), "neither numbers nor text"),
        (npy("__import__('os')", bytes(8)), "cannot be read"),
        (b"", "neither numbers nor text"),
    ],
)
def test_an_array_that_is_not_what_it_says_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as zipped:
        zipped.writestr("a.npy", content)
    with pytest.raises(DataError, match=why) as caught:
        read_npz(tmp_path / "a.npz", ["a"])
    assert "\n" not in str(caught.value)


def test_an_archive_that_is_none_is_refused(tmp_path: Path) -> None:
    path, expected = tmp_path / "a.npz", np.arange(6, dtype=np.int32).reshape(2, 3)
    np.savez(path, a=expected, b=expected)
    np.testing.assert_array_equal(read_npz(path, ["a"])["a"], expected)
    with pytest.raises(DataError, match="it has no array 'c'"):
        read_npz(path, ["c"])
    whole = path.read_bytes()
    locked = bytearray(whole)  # with a password
    locked[locked.index(b"PK\x01\x02") + 8] |= 1
    locked[6] |= 1
    for content in (b"", b"text", whole[:-30], whole[: len(whole) // 2], bytes(locked)):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"cannot be read as an \.npz archive"):
            read_npz(path, ["a"])


# --- FEMNIST, CIFAR-10, digits


def test_the_digits_archive_is_split_as_it_says(tmp_path: Path) -> None:
    images = np.arange(4, dtype=np.uint8)[:, None, None] * np.ones((1, 28, 28), np.uint8)
    columns = {"labels": np.array([1, 2, 3, 4], np.uint8), "writer": np.array([7, 8, 8, 9], np.int32)}
    np.savez(tmp_path / published.FEMNIST, images=images, split=np.array([0, 1, 0, 0], np.uint8), **columns)
    arrays = published.read_femnist(tmp_path)
    assert arrays.images[:, 0, 0, 0].tolist() == [0, 2, 3]
    assert arrays.labels.tolist() == [1, 3, 4]
    assert arrays.writers is not None
    assert arrays.writers.tolist() == [7, 8, 9]
    assert arrays.test_labels.tolist() == [2]
    np.savez(tmp_path / published.FEMNIST, images=images, split=np.zeros(3, np.uint8), **columns)
    with pytest.raises(DataError, match="one for each image"):
        published.read_femnist(tmp_path)


def tarball(path: Path, contents: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as packed:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return path


def test_the_authors_archive_of_cifar_is_converted(tmp_path: Path) -> None:
    rng, names = np.random.default_rng(0), [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    records = {name: rng.integers(0, 10, (2, 3073)).astype(np.uint8) for name in names}
    archive = tmp_path / published.CIFAR10_ARCHIVE
    tarball(archive, {name: records[name].tobytes() for name in reversed(names)})
    published.convert_cifar10(tmp_path)
    assert not archive.exists()
    pixels = np.concatenate([records[name][:, 1:].reshape(-1, 3, 32, 32) for name in names])
    labels = np.concatenate([records[name][:, 0] for name in names])
    content = [pixels[:10].transpose(0, 2, 3, 1), labels[:10], pixels[10:].transpose(0, 2, 3, 1), labels[10:]]
    arrays = published.read_cifar10(tmp_path, hashlib.sha256(b"".join(part.tobytes() for part in content)).hexdigest())
    for found, expected in zip(arrays[:4], (pixels[:10], labels[:10], pixels[10:], labels[10:]), strict=True):
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(DataError, match="not the published content"):
        published.read_cifar10(tmp_path)
    tarball(archive, {name: records[name].tobytes() for name in names[1:]})
    with pytest.raises(DataError, match="cannot be read"):
        published.convert_cifar10(tmp_path)


CLASSES = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # of the published test set
PIXELS = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def test_every_digit_is_read_once_and_a_fifth_of_each_class_is_for_testing() -> None:
    arrays = published.read_digits()
    images = np.concatenate([arrays.images, arrays.test_images])[:, 0]
    labels = np.concatenate([arrays.labels, arrays.test_labels])
    with np.load(published.HERE / published.DIGITS) as table:
        assert np.bincount(table["labels"]).tolist() == CLASSES
        assert hashlib.sha256(table["pixels"].tobytes() + table["labels"].tobytes()).hexdigest() == PIXELS
        stored = sorted(zip(table["labels"].tolist(), map(bytes, table["pixels"]), strict=True))
    assert sorted(zip(labels.tolist(), (image.tobytes() for image in images // 15), strict=True)) == stored
    assert np.bincount(arrays.test_labels).tolist() == [n // 5 for n in CLASSES]
