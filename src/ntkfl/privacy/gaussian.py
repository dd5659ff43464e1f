"""Standard Gaussian numbers from a stream of bytes, the same bits on every machine and with every library.

Libraries' generators change between versions and their logarithms between machines. Here every step is one that IEEE
754 rounds in one way only (+ − × ÷ √ and comparisons on float64, element by element): the 64-bit words of a stream
become u = (2 (word >> 12) + 1) / 2^53 ∈ (0, 1), and u becomes Φ⁻¹(u) by Wichura's rational functions (algorithm AS 241,
1988; relative error about 1e-16), with a logarithm of our own. The result is rounded to float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

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


def gaussians(stream: bytes) -> NDArray[np.float32]:
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
