"""What an attack found: numbers, the same number for a guess, and one sentence."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

Verdict = Literal["stopped", "reduced", "unchanged"]
ROLES = {
    "aggregator": "curious aggregator",
    "shuffler": "curious shuffler",
    "key-server": "curious key server",
    "aggregator+client": "aggregator and a client together",
    "aggregator+shuffler": "aggregator and shuffler together",
    "aggregator+key-server": "aggregator and key server together",
    "secure-sum": "aggregator that sees totals alone",
    "secure-sum+clients": "totals and a minority of clients together",
    "outsider": "outsider on the network",
}
# Of the way from a guess to what the attack does undefended: below the first stopped, above the second unchanged.
_STOPPED, _UNCHANGED = 0.1, 0.9
_WORKS = 0.05  # success below which there is no attack to stop


@dataclass(frozen=True)
class Finding:
    """One attack by one role. `values` has one number a trial (an image, a seed), `guess` the same for guessing.

    `perfect` is the measure's value when everything is recovered (1 for SSIM and accuracy, 0 for a relative error), so
    that larger and smaller need no convention. `images` are (original, recovered) [n, C, H, W] in 0..1.
    """

    attack: str
    role: str  # a key of ROLES
    recovers: str  # what it claims to recover, e.g. "the input x"
    measure: str  # e.g. "SSIM", "accuracy", "relative error"
    values: tuple[float, ...]
    guess: float
    perfect: float = 1.0
    says: str = ""  # one plain sentence
    verdict: Verdict | None = None  # against an undefended reference, once there is one
    reference: float | None = None  # the undefended mean
    details: dict[str, Any] = field(default_factory=dict)  # more measures, plain numbers
    images: tuple[Tensor, Tensor] | None = field(default=None, repr=False, compare=False)

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
        return _part(self.mean, self.guess, self.perfect)

    def against(self, reference: Finding) -> Finding:
        """With its verdict relative to the same attack undefended; none where that does not work undefended either."""
        if reference.success < _WORKS:
            return replace(self, verdict=None, reference=reference.mean)
        share = self.success / reference.success
        verdict: Verdict = "stopped" if share < _STOPPED else "unchanged" if share > _UNCHANGED else "reduced"
        return replace(self, verdict=verdict, reference=reference.mean)

    def dump(self) -> dict[str, Any]:
        """Plain values for JSON, without images."""
        return {
            "attack": self.attack,
            "role": self.role,
            "recovers": self.recovers,
            "measure": self.measure,
            "mean": self.mean,
            "spread": self.spread,
            "values": list(self.values),
            "guess": self.guess,
            "perfect": self.perfect,
            "success": self.success,
            "verdict": self.verdict,
            "reference": self.reference,
            "says": self.says,
            "details": self.details,
        }


def _part(value: float, nothing: float, everything: float) -> float:
    """(value − nothing)/(everything − nothing) within 0..1; 0 where there was nothing to gain."""
    gain = everything - nothing
    return 0.0 if gain == 0 else min(1.0, max(0.0, (value - nothing) / gain))
