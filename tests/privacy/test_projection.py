"""The secret projection: the same bytes everywhere, bound to its run, and of the right geometry."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from scipy.special import ndtri  # an independent implementation

from ntkfl.crypto.context import Secret
from ntkfl.privacy.projection import (
    RunSecret,
    gaussian_matrix,
    gaussians,
    make_projection,
    orthonormal,
    quantile,
    smooth,
)

SECRET = RunSecret(Secret(bytes(range(32))), "federation", "run")
# Test vectors for other implementations: ρ = 00 01 … 1f, federation "federation", run "run".
SMALL = ["-0x1.6ebc90p-2", "-0x1.d2e2eep+0", "0x1.47bed0p+1", "0x1.c05344p-1", "0x1.51402cp+0", "-0x1.8d03c4p-1"]
SMALL_ORTHONORMAL = [
    "-0x1.f98b26p-4", "-0x1.afc5eap-1", "0x1.c3cb62p-1", "0x1.2edc76p-3", "0x1.d0e5c0p-2", "-0x1.088b18p-1",
]  # fmt: skip
LARGE = "bee933f9f82430071063c9bc843fbef98df50fbb431060b7bff5da512d069e4e"
LARGE_ORTHONORMAL = "58de19a5da15c746394226f576f5fe991235b47bd8da88a53c93f994b968361f"
LARGE_SMOOTH = "ca7f2881c327f701d1ed6d72caad110ecd15107cf94de2efa4da2d50b4fe3205"


def digest(matrix: np.ndarray) -> str:
    return hashlib.sha256(matrix.astype("<f4").tobytes()).hexdigest()


def test_vectors() -> None:
    small = gaussian_matrix(SECRET, 3, 2)
    assert small.ravel().tolist() == [float.fromhex(text) for text in SMALL]
    assert orthonormal(small).ravel().tolist() == [float.fromhex(text) for text in SMALL_ORTHONORMAL]
    large = gaussian_matrix(SECRET, 784, 200)
    assert digest(large) == LARGE
    assert digest(orthonormal(large)) == LARGE_ORTHONORMAL
    assert digest(make_projection(SECRET, (1, 28, 28), 200, "smooth").matrix.numpy()) == LARGE_SMOOTH
    assert SECRET.key_id == "5c3b5213dd7fcbf0"


@pytest.mark.parametrize(
    "other",
    [
        RunSecret(Secret(bytes(range(1, 33))), "federation", "run"),
        RunSecret(Secret(bytes(range(32))), "federation2", "run"),
        RunSecret(Secret(bytes(range(32))), "federation", "run2"),
        RunSecret(Secret(bytes(range(32))), "federationr", "un"),
    ],
)
def test_bound_to_seed_federation_and_run(other: RunSecret) -> None:
    a, b = gaussian_matrix(SECRET, 100, 50), gaussian_matrix(other, 100, 50)
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.06
    assert SECRET.key_id != other.key_id


def test_orthonormal_columns_span_the_gaussians() -> None:
    G = gaussian_matrix(SECRET, 784, 200)
    Q = orthonormal(G).astype(np.float64)
    assert np.abs(Q.T @ Q - np.eye(200)).max() < 1e-7
    R = Q.T @ G.astype(np.float64)
    assert np.abs(Q @ R - G).max() < 1e-5
    assert np.abs(np.tril(R, -1)).max() < 1e-4  # column by column: the first k span what the first k did
    assert (np.diag(R) > 0).all()
    reference = np.linalg.qr(G.astype(np.float64))[0]
    assert np.abs(np.abs(reference) - np.abs(Q)).max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_projected_inputs(dtype: torch.dtype) -> None:
    """z = x P / √d1 has features the size of the inputs'; in every dtype P is the same numbers."""
    project = make_projection(SECRET, (1, 28, 28), 200)
    x = torch.randn(50, 1, 28, 28, generator=torch.Generator().manual_seed(0), dtype=dtype)
    z = project(x)
    assert z.shape == (50, 200)
    assert z.dtype == dtype
    expected = x.double().flatten(1) @ project.matrix.double() * project.scale
    assert (z.double() - expected).abs().max() < (1e-4 if dtype == torch.float32 else 1e-12)
    assert abs(float(z.double().square().mean()) - 1) < 0.1


def test_the_seed_does_not_show() -> None:
    shown = repr(SECRET) + str(SECRET) + repr(make_projection(SECRET, (4,), 2))
    assert bytes(range(32)).hex() not in shown
    assert "\\x00" not in shown
    assert "<secret>" in shown


def test_smoothing_by_hand() -> None:
    """One pass over a single pixel spreads it as 1 2 1 both ways; edges give back what would leave."""
    picture = np.zeros((1, 5, 5, 1), dtype=np.float32)
    picture[0, 2, 2] = 16
    once = smooth(picture.reshape(25, 1), (1, 5, 5)).reshape(5, 5)
    assert once[1:4, 1:4].tolist() == [[1, 2, 1], [2, 4, 2], [1, 2, 1]]
    corner = np.zeros((25, 1), dtype=np.float32)
    corner[0] = 16
    assert smooth(corner, (5, 5)).reshape(5, 5)[:2, :2].tolist() == [[9, 3], [3, 1]]
    constant = np.full((784, 3), 2.5, dtype=np.float32)
    assert np.array_equal(smooth(constant, (1, 28, 28)), constant)  # 4 passes, exact
    spread = smooth(np.eye(784, dtype=np.float32)[:, [14 * 28 + 14]], (28, 28)).reshape(28, 28)
    rows = np.arange(28) - 14
    assert abs((spread.sum(1) * rows**2).sum() - 4 / 2) < 1e-6  # variance n/2


def test_a_smooth_projection_keeps_more_of_a_smooth_picture() -> None:
    grid = np.linspace(-1, 1, 28)
    pictures = np.stack([np.cos(a * grid[:, None] + b * grid[None, :]) for a in (1, 2, 3) for b in (0, 2)])
    x = torch.from_numpy(pictures).reshape(6, 1, 28, 28)
    P = make_projection(SECRET, (1, 28, 28), 100, "smooth").matrix.double()
    rough = torch.from_numpy(orthonormal(gaussian_matrix(SECRET, 784, 100))).double()
    smoothed, plain = (float((x.flatten(1) @ Q).square().sum() / x.square().sum()) for Q in (P, rough))
    assert smoothed > 0.9
    assert plain < 0.3
    assert float((P.T @ P - torch.eye(100)).abs().max()) < 1e-6


def test_smooth_columns_of_two_secrets_are_strangers() -> None:
    """What smoothing leaves secret: a column says little about the same column under another seed."""
    other = RunSecret(Secret(bytes(range(1, 33))), "federation", "run")
    P, R = (make_projection(s, (1, 28, 28), 100, "smooth").matrix.double() for s in (SECRET, other))
    assert float((P * R).sum(0).abs().mean()) < 0.2


# Gaussians from a stream: right, and the same bits everywhere


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


def test_vectors_of_gaussians() -> None:
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
