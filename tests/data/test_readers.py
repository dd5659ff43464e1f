"""FEMNIST's and CIFAR-10's files, MNIST's writers, and .npz archives in general."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ntkfl.data import cifar, femnist
from ntkfl.data.arrays import read_npz
from ntkfl.errors import DataError

# --- .npz archives


def npy(header: str, data: bytes = b"") -> bytes:
    """A .npy file with a header of one's choosing."""
    padded = header.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode() + data


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as zipped:
        for name, content in members.items():
            zipped.writestr(f"{name}.npy", content)
    return path


def test_an_array_is_read_as_it_is(tmp_path: Path) -> None:
    expected = np.arange(6, dtype=np.int32).reshape(2, 3)
    np.savez_compressed(tmp_path / "a.npz", a=expected, b=expected)
    np.testing.assert_array_equal(read_npz(tmp_path / "a.npz", {"a": ("i", 2)})["a"], expected)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (npy("{'descr': '|u1', 'fortran_order': False, 'shape': (4000000000, 4000), }", bytes(8)), "cannot be read"),
        (npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1, 1), }", bytes(8)), "float64"),
        (npy("{'descr': '|u1', 'fortran_order': False, 'shape': (8,), }", bytes(8)), "2-D"),
        (npy("{'descr': '|O', 'fortran_order': False, 'shape': (1, 1), }", bytes(8)), "Object arrays cannot be loaded"),
        (npy("__import__('os')", bytes(8)), "cannot be read"),
        (b"", "not of kind"),
    ],
)
def test_an_array_that_is_not_what_it_says_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        read_npz(archive(tmp_path / "a.npz", a=content), {"a": ("u", 2)})
    assert "\n" not in str(caught.value)


def test_an_archive_that_is_none_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", b=np.zeros((2, 2), np.uint8))
    with pytest.raises(DataError, match="not the archive expected"):
        read_npz(tmp_path / "a.npz", {"a": ("u", 2)})
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cannot be read as an \.npz archive"):
        read_npz(tmp_path / "a.npz", {"b": ("u", 2)})


# --- FEMNIST


def leaf(folder: Path, part: str, name: str, users: dict[str, list[tuple[float, int]]]) -> None:
    """A LEAF file: every sample one grey level and a label."""
    data = {user: {"x": [[grey] * 784 for grey, _ in rows], "y": [y for _, y in rows]} for user, rows in users.items()}
    content = {"users": list(users), "num_samples": [len(rows) for rows in users.values()], "user_data": data}
    (folder / part).mkdir(exist_ok=True)
    (folder / part / f"{name}.json").write_text(json.dumps(content))


def test_leaf_files_become_digits_bright_on_black(tmp_path: Path) -> None:
    leaf(tmp_path, "train", "all_data_1", {"f2_b": [(1.0, 3), (0.0, 9)], "f1_a": [(0.25, 0)]})
    leaf(tmp_path, "train", "all_data_0", {"f3_c": [(0.5, 10), (1.0, 7)], "empty": []})  # 10 is the capital A
    leaf(tmp_path, "test", "all_data_0", {"f1_a": [(1.0, 5), (0.0, 61)]})
    arrays = femnist.read(tmp_path)
    assert arrays.images.shape == (4, 1, 28, 28)
    assert arrays.images[:, 0, 0, 0].tolist() == [0, 0, 255, 191]  # 255 − round(255 x)
    assert arrays.labels.tolist() == [7, 3, 9, 0]
    assert arrays.writers is not None
    assert arrays.writers.tolist() == [2, 1, 1, 0]
    assert arrays.test_labels.tolist() == [5]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"users": ["a"], "user_data": {"a": {"x": [[0.5]], "y": [1]}}}',
        '{"users": ["a"], "user_data": {"a": {"x": [' + str([2.0] * 784) + '], "y": [1]}}}',
        '{"users": ["a"], "user_data": {"a": {"x": [' + str([0.5] * 783) + ', NaN]], "y": [1]}}}',
        '{"users": ["a"], "user_data": {"a": {"x": [' + "[NaN" + ", 0.5" * 783 + ']], "y": [1]}}}',
    ],
)
def test_a_broken_leaf_file_is_named(tmp_path: Path, content: str) -> None:
    leaf(tmp_path, "test", "b", {"a": [(1.0, 5)]})
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "broken.json").write_text(content)
    with pytest.raises(DataError, match=r"broken\.json: ") as caught:
        femnist.read(tmp_path)
    assert "\n" not in str(caught.value)


def test_leaf_needs_both_parts(tmp_path: Path) -> None:
    leaf(tmp_path, "train", "a", {"a": [(1.0, 5)]})
    assert femnist.find(tmp_path) == ()


def test_the_digits_archive_is_split_as_it_says(tmp_path: Path) -> None:
    images = np.arange(4, dtype=np.uint8)[:, None, None] * np.ones((1, 28, 28), np.uint8)
    columns = {"labels": np.array([1, 2, 3, 4], np.uint8), "writer": np.array([7, 8, 8, 9], np.int32)}
    np.savez(tmp_path / femnist.NPZ, images=images, split=np.array([0, 1, 0, 0], np.uint8), **columns)
    arrays = femnist.read(tmp_path)
    assert arrays.images[:, 0, 0, 0].tolist() == [0, 2, 3]
    assert arrays.labels.tolist() == [1, 3, 4]
    assert arrays.writers is not None
    assert arrays.writers.tolist() == [7, 8, 9]
    assert arrays.test_labels.tolist() == [2]
    np.savez(tmp_path / femnist.NPZ, images=images, split=np.zeros(3, np.uint8), **columns)
    with pytest.raises(DataError, match="same length"):
        femnist.read(tmp_path)


# --- CIFAR-10


def batches() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 10, (2, 3073)).astype(np.uint8) for name in cifar.BATCHES}


def tarball(path: Path, contents: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as packed:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return path


def test_both_forms_of_cifar_hold_the_same_records(tmp_path: Path) -> None:
    expected = batches()
    contents = {name: batch.tobytes() for name, batch in reversed(expected.items())} | {"readme.html": b"hello"}
    packed = cifar.read_archive(tarball(tmp_path / cifar.ARCHIVE, contents), rows=2)
    records = np.concatenate(list(expected.values()))
    images, labels = records[:, 1:].reshape(12, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0]
    np.savez(tmp_path / cifar.NPZ, x_train=images[:10], y_train=labels[:10], x_test=images[10:], y_test=labels[10:])
    for read in (packed, cifar.read_npz_batches(tmp_path / cifar.NPZ, rows=2)):
        for batch, wanted in zip(read, expected.values(), strict=True):
            np.testing.assert_array_equal(batch, wanted)


def test_a_cifar_archive_must_be_whole_and_authentic(tmp_path: Path) -> None:
    contents = {name: batch.tobytes() for name, batch in batches().items()}
    short = {**contents, "data_batch_3.bin": contents["data_batch_3.bin"][:-1]}
    with pytest.raises(DataError, match=r"no whole data_batch_3\.bin"):
        cifar.read_archive(tarball(tmp_path / cifar.ARCHIVE, short), rows=2)
    path = tarball(tmp_path / cifar.ARCHIVE, contents)
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(DataError, match="cannot be read"):
        cifar.read_archive(path, rows=2)
    path.write_bytes(b"no archive")
    with pytest.raises(DataError, match="cannot be read"):
        cifar.read(tmp_path)


# --- digits
