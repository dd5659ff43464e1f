"""The built-in digits are scikit-learn's, and cost no import of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from ntkfl.data import digits
from ntkfl.errors import DataError


def test_every_digit_is_there_once() -> None:
    arrays = digits.read()
    images = np.concatenate([arrays.images, arrays.test_images])[:, 0]
    labels = np.concatenate([arrays.labels, arrays.test_labels])
    theirs = load_digits()
    ours = sorted((label, image.tobytes()) for label, image in zip(labels, images // 15, strict=True))
    assert ours == sorted(
        (label, image.astype(np.uint8).tobytes()) for label, image in zip(theirs.target, theirs.images, strict=True)
    )
    assert np.bincount(arrays.test_labels).tolist() == (np.bincount(theirs.target) // 5).tolist()


def test_without_the_file_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Elsewhere:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr(digits, "find_spec", lambda name: Elsewhere)
    with pytest.raises(DataError, match="the digits of scikit-learn cannot be read"):
        digits.read()
