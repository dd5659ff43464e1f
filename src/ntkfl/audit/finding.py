"""What an attack found: numbers, the same number for a guess, and one sentence."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

ROLES = {
    "aggregator": "curious aggregator",
    "aggregator+insider": "aggregator and whoever knows the projection: a client or the key server",
    "aggregator+shuffler": "aggregator and shuffler together",
    "secure-sum": "aggregator that sees totals alone",
    "shuffler": "curious shuffler",
    "key-server": "curious key server",
    "outsider": "outsider",
}


@dataclass(frozen=True)
class Finding:
    """One attack by one role. `values` has one number a trial (an image, a seed), `guess` the same for guessing.

    `perfect` is the measure's value when everything is recovered (1 for SSIM and accuracy, 0 for a relative error), so
    that larger and smaller need no convention.
    """

    attack: str
    role: str  # a key of ROLES
    recovers: str  # what it claims to recover, e.g. "inputs"
    measure: str  # e.g. "SSIM", "accuracy", "relative error"
    values: tuple[float, ...]
    guess: float
    perfect: float = 1.0
    says: str = ""  # one plain sentence
    details: dict[str, Any] = field(default_factory=dict)  # more measures, plain numbers

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"unknown role {self.role!r}")
        if not self.values:
            raise ValueError(f"{self.attack}: a finding without a number")

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float:
        """The standard deviation over trials; 0 for one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def success(self) -> float:
        """How far from guessing (0) to recovering everything (1), clipped to that range."""
        gain = self.perfect - self.guess
        return 0.0 if gain == 0 else min(1.0, max(0.0, (self.mean - self.guess) / gain))

    def dump(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"mean": self.mean, "spread": self.spread, "success": self.success}
