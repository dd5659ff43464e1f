"""What noise is worth: (ε, δ) for one round and for a run, each beside the assumptions it holds under.

Compositions are by Google's dp-accounting (Rényi divergences where clients are sampled). Neighbours differ by one
client replaced, never by their number.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from ntkfl.extras import missing

SIMULATED = "simulated: the noise follows from the run's seed and hides nothing; ε is what a deployment would have"


class Participation(NamedTuple):
    """How often a run uses its clients' data; `times` is the client that takes part most often."""

    times: int
    cohort: int
    clients: int
    rounds: int
    simulated: bool


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


def library(name: str) -> ModuleType:
    """A module of dp-accounting, which the extra `audit` brings."""
    try:
        return importlib.import_module(f"dp_accounting.{name}" if name else "dp_accounting")
    except ImportError:
        raise missing("(ε, δ)", "audit") from None
