"""What discrete Gaussian noise on sums is worth: concentrated differential privacy, and (ε, δ) of a whole run.

A vector of integers that a record changes by at most Δ in 2-norm, under the sum of n clients' discrete Gaussian noise
of standard deviation σ each, is ρ-concentrated differentially private with

    ρ = ½ min( Δ²/(n σ²) + τ d / 2,  (Δ/(√n σ) + τ √d)² ),   τ = 10 Σ_{k=1}^{n−1} exp(−2π² σ² k/(k+1))

(Kairouz, Liu, Steinke, The Distributed Discrete Gaussian Mechanism, ICML 2021, theorem 1): sums of discrete Gaussians
are nearly one. ρ of several releases add up. `epsilon_of` is the closed form from ρ to ε (Canonne, Kamath, Steinke
2020, proposition 12), for any α > 1; `guarantee` asks dp-accounting. A record is added or removed.
"""

from __future__ import annotations

import math

import numpy as np

from ntkfl.errors import ConfigError
from ntkfl.privacy.accounting import SIMULATED, Guarantee, library

ORDERS = tuple((1 + np.logspace(-2, 4, 600)).tolist())  # α, Rényi orders
_DEPLOYED = "each client draws its noise from its operating system's randomness and shows it to nobody"


def concentrated(change: float, sigma: float, clients: int, numbers: int) -> float:
    """ρ of one release of `numbers` integers: Δ = change, σ of each of `clients` clients."""
    k = np.arange(1, clients)
    tau = 10 * float(np.exp(-2 * math.pi**2 * sigma**2 * k / (k + 1)).sum())
    plain = change / (math.sqrt(clients) * sigma)
    return 0.5 * min(plain**2 + tau * numbers / 2, (plain + tau * math.sqrt(numbers)) ** 2)


def epsilon_of(rho: float, delta: float) -> float:
    """min over α of ρα + ln(1/(αδ))/(α − 1) + ln(1 − 1/α), at least 0."""
    if rho == 0:
        return 0.0
    a = np.asarray(ORDERS)
    return max(0.0, float((rho * a - np.log(a * delta) / (a - 1) + np.log1p(-1 / a)).min()))


def budget(epsilon: float, delta: float) -> float:
    """The largest ρ that is worth (ε, δ)."""
    if not (epsilon > 0 and 0 < delta < 1):
        raise ConfigError(f"privacy is ε above 0 and δ between 0 and 1, got {epsilon} and {delta}")
    low, high = 0.0, 1.0
    while epsilon_of(high, delta) < epsilon:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon_of(middle, delta) <= epsilon else (low, middle)
    return low


def guarantee(
    releases: list[tuple[float, int]], delta: float, *, clients: int, against: str, secure: bool, simulated: bool
) -> Guarantee:
    """(ε, δ) of a record, of `releases` (ρ, times), where the noise of `clients` honest clients counts."""
    accounting = library("")
    relation = accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = library("rdp").RdpAccountant(orders=ORDERS, neighboring_relation=relation)
    for rho, times in releases:
        accountant.compose(accounting.ZCDpEvent(rho), times)
    trust = "aggregator and shuffler do not collude" if secure else "the server sees each client's reply: it is trusted"
    assumptions = (
        SIMULATED if simulated else _DEPLOYED,
        "a record is added or removed: a replaced one is two such changes",
        trust,
        f"at least {clients} clients of each round are honest; others may tell their noise",
        "no credit for sampling: the record's client may be in every round, and cohorts are no secret",
    )
    return Guarantee(float(accountant.get_epsilon(delta)), delta, "record", against, assumptions, simulated)
