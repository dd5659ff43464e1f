"""Handwritten digits of 8×8 pixels that come with the package: small, and always there.

They are the 1,797 test rows of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, 1998, CC BY 4.0), the same as scikit-learn's, as grey levels 0..16.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ntkfl.data.arrays import Arrays, read_npz

FILE = Path(__file__).with_name("digits.npz")


def read(path: Path = FILE) -> Arrays:
    """1,442 training and 355 test digits, uint8 [N, 1, 8, 8]; the fifth of every five rows of a class is for testing.

    Grey levels 0..16 become multiples of 15, 0..240: the largest scale that fits a byte without rounding any level.
    """
    table = read_npz(path, {"pixels": ("u", 2), "labels": ("u", 1)})
    labels = table["labels"].astype(np.int64)
    images = (15 * table["pixels"]).reshape(-1, 1, 8, 8)
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        # By class, since the file runs 0, 1, …, 9, 0, 1, …: every fifth row of it would hold two classes only.
        test[np.flatnonzero(labels == label)[4::5]] = True
    return Arrays(images[~test], labels[~test], images[test], labels[test])
