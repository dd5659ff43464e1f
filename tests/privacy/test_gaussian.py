"""Gaussians from a stream: right, and the same bits everywhere."""

from __future__ import annotations

import hashlib

import numpy as np
from scipy.special import ndtri  # an independent implementation

from ntkfl.privacy.projection import gaussians, quantile


def test_quantiles_against_an_independent_implementation() -> None:
    rng = np.random.default_rng(0)
    u = np.concatenate([rng.random(200_000), 10.0 ** -rng.uniform(0, 15.9, 20_000), [0.5, 0.075, 0.925]])
    expected = ndtri(u)
    assert np.max(np.abs(quantile(u) - expected) / np.maximum(np.abs(expected), 1e-3)) < 2e-15


def test_words_become_numbers_one_by_one() -> None:
    """The two middle words lie on either side of the median; byte order is fixed."""
    words = np.array([0, 2**63 - 1, 2**63, 2**64 - 1], dtype="<u8")
    low, below, above, high = gaussians(words.tobytes())
    assert low == -high
    assert below == -above
    assert 0 < above < 1e-15
    assert np.array_equal(gaussians(words[2:].tobytes()), [above, high])


def test_vectors() -> None:
    """The bytes 0, 1, 2 … 255 and a long stream: what any implementation must give."""
    first = gaussians(bytes(range(256)))
    assert [float(x).hex() for x in first[:4]] == VECTOR
    long = hashlib.shake_256(b"ntkfl test stream").digest(8 * 1_000_000)
    numbers = gaussians(long)
    assert hashlib.sha256(numbers.astype("<f4").tobytes()).hexdigest() == LONG
    moments = [float(np.mean(numbers.astype(np.float64) ** p)) for p in (1, 2, 3, 4)]
    assert np.allclose(moments, [0, 1, 0, 3], atol=0.02)


VECTOR = ["-0x1.eb7e380000000p+0", "-0x1.909a820000000p+0", "-0x1.56f2da0000000p+0", "-0x1.2ad15e0000000p+0"]
LONG = "e1dad08fd48f5f02e495f67dbafc3549fb1665a96508741ca0c170f3151d4bfd"
