"""scikit-learn's 8×8 digits: small, and always there."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ntkfl.data.arrays import Arrays
from ntkfl.errors import DataError


def read() -> Arrays:
    """1,442 training and 355 test digits, uint8 [N, 1, 8, 8]; the fifth of every five rows of a class is for testing.

    Grey levels 0..16 become multiples of 15, 0..240: the largest scale that fits a byte without rounding any level.
    """
    pixels, labels = _table()
    images = (15 * pixels).astype(np.uint8).reshape(-1, 1, 8, 8)
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        # By class, since the file runs 0, 1, …, 9, 0, 1, …: every fifth row of it would hold two classes only.
        test[np.flatnonzero(labels == label)[4::5]] = True
    return Arrays(images[~test], labels[~test], images[test], labels[test])


def _table() -> tuple[np.ndarray, np.ndarray]:
    """Grey levels [1797, 64] and classes, out of scikit-learn's own file: importing scikit-learn takes seconds."""
    package = find_spec("sklearn")
    folder = Path(package.origin).parent if package and package.origin else Path()
    try:
        with gzip.open(folder / "datasets" / "data" / "digits.csv.gz", "rt") as lines:
            table = np.loadtxt(lines, delimiter=",", dtype=np.int64)
    except (OSError, ValueError) as error:
        raise DataError(f"the digits of scikit-learn cannot be read: {error}") from None
    return table[:, :64], table[:, 64]
