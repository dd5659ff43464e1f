"""The secret projection z = x P of clients' inputs, from a 32-byte seed ρ that the key server gives to clients alone.

P ∈ R^{d1×d1'} has independent standard Gaussian entries (the paper), or, for images, orthonormal columns that span a
random subspace of smooth pictures, in which most of an image lies. It is the same,
bit for bit, on every machine: SHAKE-256 absorbs the seed with all it is bound to, its output becomes Gaussians by
`gaussian.py`, and what follows is additions and multiplications in a fixed order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkfl.crypto.context import Secret, bind
from ntkfl.errors import ConfigError, ModelError, unknown
from ntkfl.privacy.gaussian import gaussians

KINDS = ("gaussian", "smooth")
SEED_BYTES = 32
_VANISHED = 1e-10  # a column this short is all rounding


@dataclass(frozen=True)
class RunSecret:
    """ρ and the federation and run it belongs to: the same ρ elsewhere gives another P."""

    seed: Secret
    federation: str
    run: str

    @staticmethod
    def simulated(seed: int) -> RunSecret:
        """The secret of a simulation, derived from its root seed: no secret at all, and said so by its name."""
        digest = hashlib.sha256(bind("ntkfl simulated seed v1", str(seed))).digest()
        return RunSecret(Secret(digest), "simulation", f"seed-{seed}")

    @property
    def key_id(self) -> str:
        """A name for ρ that says nothing of it: 16 hexadecimal digits of a hash no search over ρ can invert."""
        return hashlib.sha256(bind("ntkfl key id v1", self.federation, self.run, self.seed.reveal())).hexdigest()[:16]


@dataclass(frozen=True)
class Projection:
    """z = scale · x P."""

    matrix: Tensor = field(repr=False)  # [d1, d1']
    scale: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, ...] with d1 features in all -> z [n, d1']."""
        flat = x.flatten(1)
        d1 = self.matrix.shape[0]
        if flat.shape[1] != d1:
            raise ModelError(f"inputs of {flat.shape[1]} features for a projection of {d1}")
        return (flat @ self.matrix.to(flat)).mul_(self.scale)


def make_projection(secret: RunSecret, input_shape: Sequence[int], outputs: int, kind: str = "gaussian") -> Projection:
    """The projection of a run from inputs of this shape, d1 numbers in all, to d1' = `outputs` features.

    The Gaussian P is divided by √d1, which keeps a projected feature at the size of an input's root mean square; the
    paper does not, and its z is √d1 times larger. Orthonormal columns have that size by themselves.
    """
    if kind not in KINDS:
        raise unknown("projection", kind, KINDS)
    inputs = math.prod(input_shape)
    if not 1 <= outputs < inputs:
        raise ConfigError(f"a projection must go to fewer features than the {inputs} there are, got {outputs}")
    matrix = gaussian_matrix(secret, inputs, outputs)
    if kind == "smooth":
        return Projection(torch.from_numpy(orthonormal(smooth(matrix, input_shape))))
    return Projection(torch.from_numpy(matrix), inputs**-0.5)


def gaussian_matrix(secret: RunSecret, inputs: int, outputs: int) -> NDArray[np.float32]:
    """P, row by row from SHAKE-256 of the bound seed, 8 bytes an entry. float32 [d1, d1']."""
    seed = secret.seed.reveal()
    if len(seed) != SEED_BYTES:
        raise ConfigError(f"a projection's seed has {SEED_BYTES} bytes")
    bound = bind("ntkfl projection v1", secret.federation, secret.run, seed, inputs, outputs)
    stream = hashlib.shake_256(bound).digest(8 * inputs * outputs)
    return gaussians(stream).reshape(inputs, outputs)


def smooth(matrix: NDArray[np.float32] | NDArray[np.float64], shape: Sequence[int]) -> NDArray[np.float64]:
    """Columns as pictures [..., H, W], smoothed along both axes: x_i ← (x_{i−1} + 2 x_i + x_{i+1})/4, edges repeated.

    Four times for 28×28 images, for others in proportion to their pixels, at least once: n times is close to a Gaussian
    of variance n/2 pixels². All columns alike: smoothing the first ones more would order them by coarseness, pack more
    of an image into fewer numbers, and make the columns of two secrets resemble each other.
    """
    if len(shape) < 2 or min(shape[-2:]) < 2:
        raise ConfigError(f"a smooth projection is for images, inputs of shape […, height, width], got {list(shape)}")
    pictures = matrix.astype(np.float64).reshape(*shape, -1)
    for _ in range(max(1, 4 * math.prod(shape[-2:]) // 784)):
        for axis in (len(shape) - 2, len(shape) - 1):
            pictures = _smooth_once(pictures, axis)
    return pictures.reshape(matrix.shape)


def _smooth_once(x: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    padded = np.concatenate([x.take([0], axis), x, x.take([-1], axis)], axis)
    before, after = (padded.take(range(start, start + x.shape[axis]), axis) for start in (0, 2))
    result: NDArray[np.float64] = ((before + after) + 2.0 * x) * 0.25
    return result


def orthonormal(matrix: NDArray[np.float32] | NDArray[np.float64]) -> NDArray[np.float32]:
    """Orthonormal columns with the span of the first, the first two, … columns of `matrix`, rounded to float32.

    Modified Gram–Schmidt, twice, in float64, with every sum taken in order: a library's QR differs from machine to
    machine in its last bits.
    """
    Q = matrix.astype(np.float64)
    for _ in range(2):
        for j in range(Q.shape[1]):
            column = Q[:, j]
            size = np.sqrt(_sum(column * column))
            if not size > _VANISHED:
                raise ConfigError(f"{Q.shape[1]} orthonormal columns do not exist: ask for fewer features")
            column /= size
            rest = Q[:, j + 1 :]
            if rest.shape[1]:
                rest -= column[:, None] * _sum(column[:, None] * rest)
    return Q.astype(np.float32)


def _sum(terms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Σ over the first axis, one term after the other: `np.sum` may take another order on another machine."""
    total: NDArray[np.float64] = np.add.accumulate(terms, axis=0)[-1]
    return total
