"""What noise is worth: (ε, δ) for one round and for a run, each beside the assumptions it holds under.

Compositions are by Google's dp-accounting (Rényi divergences where clients are sampled). Neighbours differ by one
client replaced, never by their number.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ntkfl.extras import missing

_DEPLOYED = "each client's noise in a round comes from 32 bytes of its operating system's randomness, never shown"
SIMULATED = "simulated: the noise follows from the run's seed and hides nothing; ε is what a deployment would have"


@dataclass(frozen=True)
class Guarantee:
    """(ε, δ)-differential privacy of a `unit` (record or client) against those who see what `against` says."""

    epsilon: float
    delta: float
    unit: str
    against: str
    assumptions: tuple[str, ...]
    simulated: bool = False

    def __str__(self) -> str:
        size = "no finite ε" if math.isinf(self.epsilon) else f"ε = {self.epsilon:.3g}"
        of = " (simulated)" if self.simulated else ""
        return f"{size}{of} at δ = {self.delta:.0e} for a {self.unit}, against {self.against}"


def gaussian_epsilon(noise: float, delta: float) -> float:
    """ε of the Gaussian mechanism, exactly: a vector of norm at most 1 replaced by another, under N(0, noise²)."""
    return float(library("gaussian_mechanism").get_epsilon_gaussian(noise / 2, delta))


def client_guarantees(
    noise: float, *, cohort: int, clients: int, rounds: int, times: int, delta: float = 1e-5, simulated: bool = False
) -> list[Guarantee]:
    """Of an averaging method with noise on updates: a client against the aggregator, and against who sees models alone.

    No credit for shuffling: a round's rows are as few as its clients, below what the theorem needs.
    """
    if noise == 0:
        return []
    one, many = (gaussian_epsilon(noise / math.sqrt(n), delta) for n in (1, max(1, times)))
    accounting = library("")
    accountant = library("rdp").RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
    total = accounting.GaussianDpEvent(noise * math.sqrt(cohort) / 2)  # of the sum: √M as much noise, sensitivity 2 C
    event: Any = accounting.SampledWithoutReplacementDpEvent(clients, cohort, total)
    accountant.compose(event, rounds)
    outside = float(accountant.get_epsilon(delta))
    whole = SIMULATED if simulated else _DEPLOYED
    sampled = "cohorts are drawn uniformly without replacement and kept from the adversary, as is the server's seed"
    honest = "all of a cohort add their noise, and the aggregator shows averages alone"
    return [
        Guarantee(one, delta, "client", "the aggregator, one round", (whole,), simulated),
        Guarantee(many, delta, "client", f"the aggregator, {times} rounds", (whole,), simulated),
        Guarantee(outside, delta, "client", f"who sees all {rounds} models", (whole, honest, sampled), simulated),
    ]


def library(name: str) -> ModuleType:
    """A module of dp-accounting, which the extra `audit` brings."""
    try:
        return importlib.import_module(f"dp_accounting.{name}" if name else "dp_accounting")
    except ImportError:
        raise missing("(ε, δ)", "audit") from None
