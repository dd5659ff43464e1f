"""scikit-learn's 8×8 digits: small, and always there."""

from __future__ import annotations

import numpy as np

from ntkfl.data.arrays import Arrays


def read() -> Arrays:
    """1,442 training and 355 test digits, uint8 [N, 1, 8, 8]; the fifth of every five rows of a class is for testing.

    Grey levels 0..16 become multiples of 15, 0..240: the largest scale that fits a byte without rounding any level.
    """
    from sklearn.datasets import load_digits  # seconds to import, and only this dataset needs it

    bunch = load_digits()
    images, labels = (15 * bunch.images).astype(np.uint8)[:, None], bunch.target.astype(np.int64)
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        # By class, since the file runs 0, 1, …, 9, 0, 1, …: every fifth row of it would hold two classes only.
        test[np.flatnonzero(labels == label)[4::5]] = True
    return Arrays(images[~test], labels[~test], images[test], labels[test])
