"""Integrating y' = F(y) where F's Jacobian has a real negative spectrum: a second-order Runge–Kutta–Chebyshev method.

An s-stage step of the method (Sommeijer, Shampine and Verwer, J. Comput. Appl. Math. 88, 1998) is stable up to
hρ ≈ 0.65 s², ρ being the spectral radius: the cost grows with the square root of the stiffness, where explicit
gradient descent pays in proportion to it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

DAMPING = 2.0 / 13.0
MOST_STAGES = 2000
_MOST_STEPS = 10_000
MOST_PRODUCTS = 50_000  # flows met so far need hundreds to a few thousand
_DOUBT = 0.05  # a slope this wrong, relative to the step's, and the state is not trusted
_ITERATIONS, _TOLERANCE = 20, 0.05  # of a power iteration for the spectral radius
_RADIUS_EVERY = 25  # steps between two estimates of the spectral radius; it falls as outputs sharpen

Field = Callable[[Tensor], Tensor]


@dataclass
class Statistics:
    """What it cost: kernel products (evaluations of F, estimates of its stiffness), steps, the largest step error;
    why it ended before the last time, where it did, and what was done about it.
    """

    evaluations: int = 0
    steps: int = 0
    worst_error: float = 0.0
    stopped: str = ""
    exhausted: bool = False  # stopped for its cost alone: more precision would not help
    fallback: str = ""


class _Step(NamedTuple):
    """States and slopes at both ends of a step of size h."""

    h: float
    y: Tensor
    slope: Tensor
    end: Tensor
    end_slope: Tensor


def integrate(
    rhs: Field,
    start: Tensor,
    times: Sequence[float],
    stiffness: Callable[[Tensor], Field],
    rtol: float,
    stats: Statistics,
    rounding: float = 0.0,
) -> Iterator[Tensor]:
    """States of y' = F(y) = `rhs`(y) at the increasing `times`, from `start` at time 0, one after another, so that
    thousands of them need not be held at once. Fewer, and `stats.stopped` says why, where the error cannot be held
    (values that are not finite, steps that shrink to nothing) or the cost has no end.

    `stiffness(y)` is F's Jacobian at y, times −1, as a product with vectors. Each step's error, relative to the size of
    the state, is held below `rtol`; output times inside a step are interpolated by the cubic through both ends
    (of higher order than the step itself), so that many outputs cost no more than one.

    The state is float64 whatever precision `rhs` computes in: the recursion amplifies rounding of its state by s².
    `rounding` is that precision: slopes carry it, times the stiffness, into what is interpolated (`_between`).
    Evaluations of F and estimates of its stiffness are 50,000 at most.
    """

    def field(y: Tensor) -> Tensor:
        stats.evaluations += 1
        return rhs(y).double()

    y = start.double()
    slope = field(y)
    # The first change of the state points along the stiffest directions, nearly; an irregular part has the others.
    wave = torch.arange(slope.numel(), dtype=slope.dtype, device=slope.device).mul_(math.sqrt(7)).square_().cos_()
    vector = slope + 0.1 * slope.norm() / wave.norm() * wave.view(slope.shape)

    def radius(y: Tensor) -> float:
        """An upper estimate of the spectral radius of F's Jacobian, begun from the last one's eigenvector."""
        nonlocal vector
        value, vector, products = largest_eigenvalue(stiffness(y), vector)
        stats.evaluations += products + 1  # one for F's Jacobian itself
        return 1.2 * value

    t, pending = 0.0, deque(times)
    rho = radius(y)
    h = _first_step(field, y, slope, rho, times[-1], rtol) if math.isfinite(rho) else 0.0
    previous_h, previous_error, since_radius = 0.0, 1.0, 0
    while pending:
        reached = f"time {t:.3g} of {times[-1]:.3g}"
        if not math.isfinite(rho):
            stats.stopped = f"the kernel's largest eigenvalue is not finite at {reached}"
            return
        room = MOST_PRODUCTS - stats.evaluations - 1  # of a step's stages; one more evaluation is for its error
        if stats.steps >= _MOST_STEPS or room < 2:
            cost = f"{stats.steps} steps and {stats.evaluations} products with the kernel"
            stats.stopped, stats.exhausted = f"{cost} reached only {reached}", True
            return
        h = min(h, times[-1] - t)
        stages = _stages(h, rho)
        if stages > min(MOST_STAGES, room):
            stages = min(MOST_STAGES, room)
            h = (stages**2 - 1) / (1.54 * rho)
        end = chebyshev_step(field, y, slope, h, stages)
        step = _Step(h, y, slope, end, field(end))
        stats.steps += 1
        estimate = torch.sub(y, end).mul_(0.8).add_((slope + step.end_slope).mul_(0.4 * h))
        error = float(estimate.norm()) / (rtol * max(float(y.norm()), float(end.norm()), 1e-300))
        if not math.isfinite(error) or error > 1.0:
            h *= 0.1 if not math.isfinite(error) else max(0.1, 0.8 / error ** (1 / 3))
            rho, since_radius = max(rho, radius(y)), 0  # an unstable step looks like a large error
            if h < 1e-12 * times[-1]:
                stats.stopped = f"the flow became too steep to integrate at {reached}"
                return
            continue
        stats.worst_error = max(stats.worst_error, error * rtol)
        while pending and pending[0] <= t + h * (1 + 1e-12):
            yield _between(field, pending.popleft() - t, step, rho, rounding)
        # Predictive controller of the reference implementation: the trend of the error over the last two steps.
        error = max(error, 1e-10)
        factor = 0.8 / error ** (1 / 3)
        if previous_h:
            factor = min(factor, factor * h / previous_h * (previous_error / error) ** (1 / 3))
        previous_h, previous_error = h, error
        t += h
        h *= min(10.0, max(0.1, factor))
        y, slope = end, step.end_slope
        since_radius += 1
        if since_radius >= _RADIUS_EVERY and pending:
            rho, since_radius = radius(y), 0


def chebyshev_step(field: Field, y: Tensor, slope: Tensor, h: float, stages: int) -> Tensor:
    """One step of size h from y with F(y) = slope, by the method of `stages` stages: a three-term recursion."""
    first, coefficients = _coefficients(stages)
    before, current = y, torch.add(y, slope, alpha=first * h)
    for mu, nu, mu_tilde, gamma_tilde in coefficients:
        fresh = field(current).mul_(mu_tilde * h)
        fresh.add_(current, alpha=mu).add_(before, alpha=nu)
        fresh.add_(y, alpha=1 - mu - nu).add_(slope, alpha=gamma_tilde * h)
        before, current = current, fresh
    return current


@lru_cache(maxsize=512)
def _coefficients(stages: int) -> tuple[float, tuple[tuple[float, float, float, float], ...]]:
    """μ̃_1 and, for j = 2 … s, (μ_j, ν_j, μ̃_j, γ̃_j), from Chebyshev polynomials and their derivatives at w0."""
    w0 = 1 + DAMPING / stages**2
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


def _first_step(field: Field, y: Tensor, slope: Tensor, rho: float, end: float, rtol: float) -> float:
    """A first step from the second derivative met by one Euler step, as the reference implementation does."""
    h = min(end, 1.0 / rho) if rho > 0 else end
    trial = y + h * slope
    change = float((field(trial) - slope).norm()) * h
    size = max(float(trial.norm()), 1e-300) * rtol
    return min(end, h / math.sqrt(max(change / size, 1e-6)) * 0.1)


def _stages(h: float, rho: float) -> int:
    """Enough for a stable step of size h."""
    return max(2, 1 + math.isqrt(int(1.54 * h * rho + 1)))


def _between(field: Field, at: float, step: _Step, rho: float, rounding: float) -> Tensor:
    """The state at time `at` into a step: of the cubic with the states and slopes at both ends, or by a step of its own
    to there.

    A step damps the rounding of its slopes; interpolation adds up to h/7 of it to the state, and the stiffest
    directions multiply it by ρ again: in float32 the outputs between two ends can be wrong where both ends are right.
    Where that might be, F is asked whether the cubic's slope is its own.
    """
    h, y, slope, end, end_slope = step
    s = at / h
    state = torch.lerp(y, end, s * s * (3 - 2 * s))
    state.add_(slope, alpha=h * s * (1 - s) ** 2).add_(end_slope, alpha=-h * s * s * (1 - s))
    if s > 1 - 1e-9 or not rounding:
        return state
    size = max(float(slope.norm()), float(end_slope.norm()))
    if rho * rho * h * rounding / 7 * float(end.norm()) <= _DOUBT * size:
        return state
    cubic = (end - y) * (6 * s * (1 - s) / h) + slope * ((1 - s) * (1 - 3 * s)) + end_slope * (s * (3 * s - 2))
    if float((field(state) - cubic).norm()) <= _DOUBT * size:
        return state
    return chebyshev_step(field, y, slope, at, _stages(at, rho))


def largest_eigenvalue(product: Field, start: Tensor) -> tuple[float, Tensor, int]:
    """Power iteration for an operator with real nonnegative spectrum: an estimate from below, its vector, products.

    A start close to the answer, the vector of an earlier call, ends it after two products.
    """
    v = start / start.norm().clamp_min(1e-300)
    value = 0.0
    for count in range(1, _ITERATIONS + 1):
        image = product(v).double()
        norm = float(image.norm())
        if not norm > 0 or not math.isfinite(norm):
            return norm, v, count
        v = image / norm
        if abs(norm - value) <= _TOLERANCE * norm:
            return norm, v, count
        value = norm
    return value, v, _ITERATIONS
