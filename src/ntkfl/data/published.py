"""The file formats of published datasets: idx (MNIST, Fashion-MNIST), and .npz archives of the others.

Every reader takes the folder that holds a copy, and gives `Arrays`. No pickle is ever read. What has a published
checksum is compared with it on every load: an experiment on other pixels is another experiment.
"""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkfl.atomic import replacing
from ntkfl.errors import DataError

Bytes: TypeAlias = NDArray[np.uint8]
HERE = Path(__file__).parent

IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CIFAR10, CIFAR10_ARCHIVE = "cifar10.npz", "cifar-10-binary.tar.gz"
FEMNIST, DIGITS = "femnist_digits.npz", "digits.npz"
_GZIP_MAGIC = b"\x1f\x8b"
_CIFAR10_SHA256 = "80387ddb9a0edf3fc4a964ee3770296169bb26a651050df20035579673099660"
_KINDS = "biufU"  # of arrays: numbers and text


class Arrays(NamedTuple):
    """Images uint8 [N, C, H, W], labels [N] of any integer type; writers [N] of the training rows where known."""

    images: Bytes
    labels: NDArray[np.integer[Any]]
    test_images: Bytes
    test_labels: NDArray[np.integer[Any]]
    writers: NDArray[np.integer[Any]] | None = None


def find(folder: Path, name: str) -> Path | None:
    """The file `name` in `folder`, compressed or not."""
    return next((path for path in (folder / f"{name}.gz", folder / name) if path.is_file()), None)


def read_npz(path: Path, names: Sequence[str], optional: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
    """Arrays of an archive by name: all of `names`, and those of `optional` that it has. Nothing is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            found = {name: np.asanyarray(archive[name]) for name in (*names, *optional) if name in archive.files}
    except Exception as error:  # three formats in one another: broken ones raise whatever their readers come across
        raise DataError(f"{path}: cannot be read as an .npz archive: {' '.join(str(error).split())}") from None
    for name in names:
        if name not in found:
            raise DataError(f"{path}: not the archive expected, it has no array {name!r}")
    for name, array in found.items():
        if array.dtype.kind not in _KINDS:
            raise DataError(f"{path}: array {name!r} is {array.dtype}, neither numbers nor text")
    return found


def read_idx(folder: Path, sha256: Sequence[str]) -> Arrays:
    """Four idx files in the order of `IDX`, and the sha256 of the content of each, however it was compressed."""
    train, labels, test, test_labels = (_read_idx(folder, *each) for each in zip(IDX, sha256, strict=True))
    return Arrays(train[:, None], labels, test[:, None], test_labels)


def _read_idx(folder: Path, name: str, sha256: str) -> Bytes:
    """An array of bytes behind its header: 0, 0, 8 (for bytes), dimensions, and each dimension in four bytes."""
    path = find(folder, name)
    if path is None:
        raise DataError(f"{folder / name}[.gz] is missing")
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if raw.startswith(_GZIP_MAGIC) else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read, {error}: delete it and fetch it again") from None
    _check(path, raw, sha256)
    shape = np.frombuffer(raw, ">u4", raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def _check(path: Path, content: bytes, sha256: str) -> None:
    """`DataError` unless the content has the published digest."""
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise DataError(
            f"{path}: not the published content (sha256 {found[:12]}… instead of {sha256[:12]}…): "
            "delete it and fetch it again"
        )


def read_cifar10(folder: Path, sha256: str = _CIFAR10_SHA256) -> Arrays:
    """From images [N, 32, 32, 3] and labels [N], of which `sha256` is the digest in the order read here."""
    arrays = read_npz(folder / CIFAR10, ("x_train", "y_train", "x_test", "y_test"))
    _check(folder / CIFAR10, b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values()), sha256)
    x, y, test_x, test_y = arrays.values()
    return Arrays(x.transpose(0, 3, 1, 2), y, test_x.transpose(0, 3, 1, 2), test_y)


def convert_cifar10(folder: Path) -> None:
    """Make the .npz of the authors' archive, whose checksum was compared when it was downloaded, and remove that.

    A record of its six batches is a label, then the red, the green and the blue plane of 32 × 32 bytes.
    """
    archive = folder / CIFAR10_ARCHIVE
    batches = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    try:
        with tarfile.open(archive, "r:gz") as packed:
            members = [packed.extractfile(f"cifar-10-batches-bin/{name}") for name in batches]
            records = [np.frombuffer(member.read(), np.uint8).reshape(-1, 3073) for member in members if member]
    except (OSError, EOFError, KeyError, ValueError, tarfile.TarError, zlib.error) as error:
        raise DataError(f"{archive}: cannot be read, {error}: delete it and fetch it again") from None
    rows, test = np.concatenate(records), -len(records[5])
    x, y = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, 0]
    with replacing(folder / CIFAR10) as file:
        np.savez(file, x_train=x[:test], y_train=y[:test], x_test=x[test:], y_test=y[test:])
    archive.unlink()


def read_femnist(folder: Path) -> Arrays:
    """Digits 0-9 with their writers: images [N, 28, 28], labels, writer, and split (0 train, 1 test), each [N]."""
    path = folder / FEMNIST
    images, labels, writer, split = read_npz(path, ("images", "labels", "writer", "split")).values()
    columns = all(part.shape == images.shape[:1] and part.dtype.kind in "iu" for part in (labels, writer, split))
    if images.dtype != np.uint8 or images.shape[1:] != (28, 28) or not columns:
        needed = "labels, writer and split (0 or 1) whole numbers, one for each image"
        raise DataError(f"{path}: images must be uint8 [N, 28, 28], and {needed}")
    train, test = split == 0, split == 1
    if not train.any() or not test.any() or not 0 <= labels.min() <= labels.max() <= 9:
        raise DataError(f"{path}: labels must be 0 to 9, of training and of test images")
    return Arrays(images[train][:, None], labels[train], images[test][:, None], labels[test], writer[train])


def read_digits(folder: Path = HERE) -> Arrays:
    """1,442 training and 355 test digits uint8 [N, 1, 8, 8] that come with the package; of every five rows of a class
    the fifth is for testing.

    They are the 1,797 test rows of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine
    Learning Repository, 1998, CC BY 4.0), the same as scikit-learn's. Grey levels 0..16 become multiples of 15, 0..240:
    the largest scale that fits a byte without rounding any level.
    """
    pixels, labels = read_npz(folder / DIGITS, ("pixels", "labels")).values()
    images, test = (15 * pixels).reshape(-1, 1, 8, 8), np.zeros(len(labels), bool)
    for label in range(10):
        # By class, since the file runs 0, 1, …, 9, 0, 1, …: every fifth row of it would hold two classes only.
        test[np.flatnonzero(labels == label)[4::5]] = True
    return Arrays(images[~test], labels[~test], images[test], labels[test])
