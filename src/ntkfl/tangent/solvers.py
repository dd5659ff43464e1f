"""Integrating y' = F(y) where F's Jacobian has a real negative spectrum: a second-order Runge–Kutta–Chebyshev method.

An s-stage step of the method (Sommeijer, Shampine and Verwer, J. Comput. Appl. Math. 88, 1998) is stable up to
hρ ≈ 0.65 s², ρ being the spectral radius: the cost grows with the square root of the stiffness, where explicit
gradient descent pays in proportion to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ntkfl.errors import NumericalError

_DAMPING = 2.0 / 13.0
_MOST_STAGES = 2000
_MOST_STEPS = 10_000
_RADIUS_EVERY = 10  # steps between two estimates of the spectral radius


@dataclass
class Statistics:
    """What it cost: kernel products (evaluations of F, estimates of its stiffness), steps, the largest step error."""

    evaluations: int = 0
    accepted: int = 0
    rejected: int = 0
    worst_error: float = 0.0


def integrate(
    rhs: Callable[[Tensor], Tensor],
    start: Tensor,
    times: Sequence[float],
    radius: Callable[[Tensor], float],
    rtol: float,
) -> tuple[list[Tensor], Statistics]:
    """States at the increasing `times`, from `start` at time 0.

    `radius(y)` gives an upper estimate of the spectral radius of F's Jacobian at y. Each step's error, relative to the
    size of the state, is held below `rtol`; output times inside a step are interpolated by the cubic through both ends
    (of higher order than the step itself), so that many outputs cost no more than one.

    The state is float64 whatever precision `rhs` computes in: the recursion amplifies rounding of its state by s².
    """
    stats = Statistics()

    def F(y: Tensor) -> Tensor:
        stats.evaluations += 1
        return rhs(y)

    y = start.double()
    slope = F(y)
    t, out, pending = 0.0, [], list(times)
    rho = radius(y)
    if not math.isfinite(rho):
        raise _unbounded()
    h = _first_step(F, y, slope, rho, times[-1], rtol)
    previous_h, previous_error, since_radius = 0.0, 1.0, 0
    while pending:
        if stats.accepted + stats.rejected >= _MOST_STEPS:
            raise NumericalError(
                f"the flow could not be integrated: {_MOST_STEPS} steps reached only time {t:.3g} of {times[-1]:.3g} "
                "(values of very different size in the Jacobian?)"
            )
        if not math.isfinite(rho):
            raise _unbounded()
        h = min(h, times[-1] - t)
        stages = max(2, 1 + math.isqrt(int(1.54 * h * rho + 1)))
        if stages > _MOST_STAGES:
            stages = _MOST_STAGES
            h = (stages**2 - 1) / (1.54 * rho)
        new = _step(F, y, slope, h, stages)
        new_slope = F(new)
        error = _ratio(0.8 * (y - new) + 0.4 * h * (slope + new_slope), y, new, rtol)
        if not math.isfinite(error) or error > 1.0:
            stats.rejected += 1
            h *= 0.1 if not math.isfinite(error) else max(0.1, 0.8 / error ** (1 / 3))
            rho, since_radius = max(rho, radius(y)), 0  # an unstable step looks like a large error
            if h < 1e-12 * times[-1]:
                raise NumericalError(f"the flow became too steep to integrate at time {t:.3g} of {times[-1]:.3g}")
            continue
        while pending and pending[0] <= t + h * (1 + 1e-12):
            out.append(_hermite((pending.pop(0) - t) / h, h, y, slope, new, new_slope))
        # Predictive controller of the reference implementation: the trend of the error over the last two steps.
        factor = 0.8 / max(error, 1e-10) ** (1 / 3)
        if previous_h:
            factor = min(factor, factor * h / previous_h * (previous_error / max(error, 1e-10)) ** (1 / 3))
        previous_h, previous_error = h, max(error, 1e-10)
        t += h
        h *= min(10.0, max(0.1, factor))
        y, slope = new, new_slope
        stats.accepted += 1
        stats.worst_error = max(stats.worst_error, error * rtol)
        since_radius += 1
        if since_radius >= _RADIUS_EVERY and pending:
            rho, since_radius = radius(y), 0
    return out, stats


def _first_step(F: Callable[[Tensor], Tensor], y: Tensor, slope: Tensor, rho: float, end: float, rtol: float) -> float:
    """A first step from the second derivative met by one Euler step, as the reference implementation does."""
    h = min(end, 1.0 / rho) if rho > 0 else end
    trial = y + h * slope
    change = float((F(trial) - slope).norm()) * h
    size = max(float(trial.norm()), 1e-300) * rtol
    return min(end, h / math.sqrt(max(change / size, 1e-6)) * 0.1)


def _ratio(error: Tensor, old: Tensor, new: Tensor, rtol: float) -> float:
    size = max(float(old.norm()), float(new.norm()), 1e-300)
    return float(error.norm()) / (rtol * size)


def _step(F: Callable[[Tensor], Tensor], y: Tensor, slope: Tensor, h: float, stages: int) -> Tensor:
    """One step of the s-stage method from y with F(y) = slope."""
    first, coefficients = _coefficients(stages)
    before, current = y, torch.add(y, slope, alpha=first * h)
    for mu, nu, mu_tilde, gamma_tilde in coefficients:
        fresh = F(current).mul_(mu_tilde * h)
        fresh.add_(current, alpha=mu).add_(before, alpha=nu)
        fresh.add_(y, alpha=1 - mu - nu).add_(slope, alpha=gamma_tilde * h)
        before, current = current, fresh
    return current


@lru_cache(maxsize=512)
def _coefficients(stages: int) -> tuple[float, tuple[tuple[float, float, float, float], ...]]:
    """μ̃_1 and, for j = 2 … s, (μ_j, ν_j, μ̃_j, γ̃_j), from Chebyshev polynomials and their derivatives at w0."""
    w0 = 1 + _DAMPING / stages**2
    T, D, DD = [1.0, w0], [0.0, 1.0], [0.0, 0.0]
    for j in range(2, stages + 1):
        T.append(2 * w0 * T[j - 1] - T[j - 2])
        D.append(2 * w0 * D[j - 1] - D[j - 2] + 2 * T[j - 1])
        DD.append(2 * w0 * DD[j - 1] - DD[j - 2] + 4 * D[j - 1])
    w1 = D[stages] / DD[stages]
    b = [0.0, 0.0] + [DD[j] / D[j] ** 2 for j in range(2, stages + 1)]
    b[0] = b[1] = b[2]
    a = [1 - b[j] * T[j] for j in range(stages + 1)]
    rows = []
    for j in range(2, stages + 1):
        mu_tilde = 2 * b[j] * w1 / b[j - 1]
        rows.append((2 * b[j] * w0 / b[j - 1], -b[j] / b[j - 2], mu_tilde, -a[j - 1] * mu_tilde))
    return b[1] * w1, tuple(rows)


def _hermite(s: float, h: float, y0: Tensor, f0: Tensor, y1: Tensor, f1: Tensor) -> Tensor:
    """The cubic with values y0, y1 and slopes f0, f1, at fraction s of the step."""
    return (
        y0 * ((1 + 2 * s) * (1 - s) ** 2)
        + f0 * (h * s * (1 - s) ** 2)
        + y1 * (s * s * (3 - 2 * s))
        - f1 * (h * s * s * (1 - s))
    )


def largest_eigenvalue(
    product: Callable[[Tensor], Tensor], start: Tensor, iterations: int = 20, tolerance: float = 0.05
) -> tuple[float, Tensor]:
    """Power iteration for an operator with real nonnegative spectrum: (estimate from below, its vector).

    A start close to the answer, the vector of an earlier call, ends it after two products.
    """
    v = start / start.norm().clamp_min(1e-300)
    value = 0.0
    for _ in range(iterations):
        image = product(v)
        norm = float(image.norm())
        if not norm > 0 or not math.isfinite(norm):
            return norm, v
        v = image / norm
        if abs(norm - value) <= tolerance * norm:
            return norm, v
        value = norm
    return value, v


def _unbounded() -> NumericalError:
    return NumericalError("the kernel's largest eigenvalue is not finite: look for extreme rows in the Jacobian")
