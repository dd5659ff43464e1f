"""The secret projection z = x P of clients' inputs, from a 32-byte seed ρ that the key server gives to clients alone.

P ∈ R^{d1×d1'} has independent standard Gaussian entries (the paper), or, for images, orthonormal columns that span a
random subspace of smooth pictures, in which most of an image lies. It is the same,
bit for bit, on every machine: SHAKE-256 absorbs the seed with all it is bound to, its output becomes Gaussians, and
what follows is additions and multiplications in a fixed order.

Libraries' generators change between versions and their logarithms between machines. Here every step to a Gaussian is
one that IEEE 754 rounds in one way only (+ − × ÷ √ and comparisons on float64, element by element): the 64-bit words of
a stream become u = (2 (word >> 12) + 1) / 2^53 ∈ (0, 1), and u becomes Φ⁻¹(u) by Wichura's rational functions
(algorithm AS 241, 1988; relative error about 1e-16), with a logarithm of our own. The result is rounded to float32.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkfl.crypto.context import Secret, bind
from ntkfl.errors import ConfigError, ModelError

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]

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


def make_projection(
    secret: RunSecret, input_shape: Sequence[int], outputs: int, kind: Literal["gaussian", "smooth"] = "gaussian"
) -> Projection:
    """The projection of a run from inputs of this shape, d1 numbers in all, to d1' = `outputs` features.

    The Gaussian P is divided by √d1, which keeps a projected feature at the size of an input's root mean square; the
    paper does not, and its z is √d1 times larger. Orthonormal columns have that size by themselves.
    """
    inputs = math.prod(input_shape)
    if not 1 <= outputs < inputs:
        raise ConfigError(f"a projection must go to fewer features than the {inputs} there are, got {outputs}")
    matrix = gaussian_matrix(secret, inputs, outputs)
    if kind == "smooth":
        return Projection(torch.from_numpy(orthonormal(smooth(matrix, input_shape))))
    return Projection(torch.from_numpy(matrix), inputs**-0.5)


def gaussian_matrix(secret: RunSecret, inputs: int, outputs: int) -> Singles:
    """P, row by row from SHAKE-256 of the bound seed, 8 bytes an entry. float32 [d1, d1']."""
    seed = secret.seed.reveal()
    bound = bind("ntkfl projection v1", secret.federation, secret.run, seed, inputs, outputs)
    stream = hashlib.shake_256(bound).digest(8 * inputs * outputs)
    return gaussians(stream).reshape(inputs, outputs)


def smooth(matrix: Singles | Floats, shape: Sequence[int]) -> Floats:
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


def _smooth_once(x: Floats, axis: int) -> Floats:
    padded = np.concatenate([x.take([0], axis), x, x.take([-1], axis)], axis)
    before, after = (padded.take(range(start, start + x.shape[axis]), axis) for start in (0, 2))
    result: Floats = ((before + after) + 2.0 * x) * 0.25
    return result


def orthonormal(matrix: Singles | Floats) -> Singles:
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


def _sum(terms: Floats) -> Floats:
    """Σ over the first axis, one term after the other: `np.sum` may take another order on another machine."""
    total: Floats = np.add.accumulate(terms, axis=0)[-1]
    return total


# -- Gaussians from a stream of bytes ----------------------------------------------------------------------------------

# fmt: off
_CENTRE = (
    (3.3871328727963666080e0, 1.3314166789178437745e+2, 1.9715909503065514427e+3, 1.3731693765509461125e+4,
     4.5921953931549871457e+4, 6.7265770927008700853e+4, 3.3430575583588128105e+4, 2.5090809287301226727e+3),
    (1.0, 4.2313330701600911252e+1, 6.8718700749205790830e+2, 5.3941960214247511077e+3,
     2.1213794301586595867e+4, 3.9307895800092710610e+4, 2.8729085735721942674e+4, 5.2264952788528545610e+3),
)
_TAIL = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
     1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
)
_FAR_TAIL = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
     2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15),
)
# fmt: on
_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476


def gaussians(stream: bytes) -> Singles:
    """One standard Gaussian for every 8 bytes of the stream (words are little-endian). float32 [len(stream) / 8]."""
    words = np.frombuffer(stream, dtype="<u8")
    uniform = ((words >> np.uint64(12)).astype(np.float64) * 2.0 + 1.0) * 2.0**-53
    return quantile(uniform).astype(np.float32)


def quantile(u: Floats) -> Floats:
    """Φ⁻¹(u) for u in (0, 1), element by element."""
    q = u - 0.5
    out = np.empty_like(u)
    central = np.abs(q) <= 0.425
    r = 0.180625 - q[central] * q[central]
    out[central] = q[central] * _ratio(_CENTRE, r)
    tails = ~central
    side = q[tails]
    r = np.sqrt(-_log(np.where(side < 0, u[tails], 1.0 - u[tails])))
    value = np.where(r <= 5.0, _ratio(_TAIL, r - 1.6), _ratio(_FAR_TAIL, r - 5.0))
    out[tails] = np.where(side < 0, -value, value)
    return out


def _ratio(coefficients: tuple[Sequence[float], Sequence[float]], x: Floats) -> Floats:
    top, bottom = (_horner(c, x) for c in coefficients)
    return top / bottom


def _horner(coefficients: Sequence[float], x: Floats) -> Floats:
    """Σ c_i x^i, from the highest power down: one multiplication and one addition a step, each rounded once."""
    total = np.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total


def _log(x: Floats) -> Floats:
    """ln x = e ln 2 + 2 artanh s with x = m 2^e, m ∈ [√½, √2), s = (m − 1)/(m + 1); eleven terms of artanh's series."""
    m, e = np.frexp(x)
    low = m < _SQRT_HALF
    m = np.where(low, m * 2.0, m)
    e = np.where(low, e - 1, e)
    s = (m - 1.0) / (m + 1.0)
    series = _horner([1.0 / (2 * i + 1) for i in range(11)], s * s)
    return e * _LN2 + 2.0 * s * series
