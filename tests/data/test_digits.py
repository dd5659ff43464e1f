"""The built-in digits are scikit-learn's, and come without it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from ntkfl.data import digits
from ntkfl.errors import DataError

CLASSES = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # of the published test set
PIXELS = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def test_all_1797_digits_are_there_and_unchanged() -> None:
    with np.load(digits.FILE) as table:
        assert np.bincount(table["labels"]).tolist() == CLASSES
        assert hashlib.sha256(table["pixels"].tobytes() + table["labels"].tobytes()).hexdigest() == PIXELS


def test_every_digit_is_read_once_and_a_fifth_of_each_class_is_for_testing() -> None:
    arrays = digits.read()
    images = np.concatenate([arrays.images, arrays.test_images])[:, 0]
    labels = np.concatenate([arrays.labels, arrays.test_labels])
    with np.load(digits.FILE) as table:
        stored = sorted(zip(table["labels"].tolist(), map(bytes, table["pixels"]), strict=True))
    assert sorted(zip(labels.tolist(), (image.tobytes() for image in images // 15), strict=True)) == stored
    assert np.bincount(arrays.test_labels).tolist() == [n // 5 for n in CLASSES]


def test_they_are_scikit_learns() -> None:
    theirs = pytest.importorskip(
        "sklearn.datasets", reason="compares with scikit-learn where it is installed"
    ).load_digits()
    with np.load(digits.FILE) as table:
        assert (table["pixels"] == theirs.data).all()
        assert (table["labels"] == theirs.target).all()


def test_without_the_file_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"digits\.npz"):
        digits.read(tmp_path / "digits.npz")
