"""How fast the squared residual ‖f − y‖² falls: Theorems 1 and 2, and what they ask for.

Letters as in `bounds.py`; M clients, τ local steps. All for L = (1/N) Σ ½(f − y)².
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ntkfl.errors import ConfigError
from ntkfl_experiments.theory.bounds import FLIP


def descent_factor(lr: float, smallest: float, samples: int, steps: float) -> float:
    """Theorem 1: ‖f^(k+1) − y‖² ≤ (1 − ηλ/(2N))^t ‖f^(k) − y‖²."""
    share = lr * smallest / (2 * samples)
    if not 0 <= share < 1:
        raise ConfigError(f"the bound needs 0 ≤ ηλ < 2N: got η = {lr:g}, λ = {smallest:g}, N = {samples}")
    return math.exp(steps * math.log1p(-share))


def fedavg_factor(lr: float, smallest: float, samples: int, local_steps: int, clients: int = 1) -> float:
    """Theorem 2: ‖f^(k+1) − y‖² ≤ (1 − ητλ/(2N M)) ‖f^(k) − y‖².

    As printed with M = `clients`. The M comes from dividing each client's gradient by all N and then by M again; with
    the paper's own F_m, a mean over N_m = N/M samples, it is gone: `clients` = 1.
    """
    return 1 - lr * local_steps * smallest / (2 * samples * clients)


def flow_factor(lr: float, smallest: float, samples: int, steps: float) -> float:
    """The slowest direction of the paper's function evolution e^{−ηtH/N}: ‖f − y‖² falls by e^{−2ηtλ/N} at least."""
    return math.exp(-2 * lr * steps * smallest / samples)


def proof_factor(lr: float, smallest: float, samples: int, n: int, radius: float, alpha: float, delta: float) -> float:
    """The factor a step has before the proof of Theorem 1 rounds it to 1 − ηλ/(2N):

    1 + 8√2 ηR/(√π δα) + 2η √(ln(2N²/δ)/(2n)) − 2ηλ/N + η². Below 1 only if all three requirements hold.
    """
    drift = 8 * FLIP * lr * radius / (delta * alpha)
    deviation = 2 * lr * math.sqrt(math.log(2 * samples**2 / delta) / (2 * n))
    return 1 + drift + deviation - 2 * lr * smallest / samples + lr**2


@dataclass(frozen=True)
class Requirements:
    """What makes the proof's factor at most 1 − ηλ/(2N): each of its three positive terms at most ηλ/(2N).

    The paper writes O(·) and Ω(·); these are constants that do it. `width` is the paper's order, N²/λ² ln(N²/δ);
    `width_to_stay` is what it takes for the weights to stay within `radius`, which the paper assumes: order N⁴/λ⁴.
    """

    lr: float
    radius: float
    width: float
    width_to_stay: float


def requirements(
    samples: int, smallest: float, alpha: float, delta: float, squared_residual: float | None = None
) -> Requirements:
    """For Theorem 1; `squared_residual` is ‖f^(k) − y‖², N by default.

    Within the bound Σ_u ‖r(u)‖ ≤ ‖r(0)‖ 4N/(ηλ), so a neuron moves by at most (η/√(nN)) Σ_u ‖r(u)‖ ≤ 4 √(N/n) ‖r(0)‖/λ.
    """
    share = smallest / (2 * samples)
    radius = share * delta * alpha / (8 * FLIP)
    width = 2 * math.log(2 * samples**2 / delta) / share**2
    initial = float(samples) if squared_residual is None else squared_residual
    width_to_stay = 16 * samples * initial / (smallest * radius) ** 2
    return Requirements(share, radius, width, width_to_stay)
