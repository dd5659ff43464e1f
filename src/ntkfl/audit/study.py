"""All attacks on one round, and a sentence for each role."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ntkfl.audit import membership, rows, sums
from ntkfl.audit.capture import Capture
from ntkfl.audit.finding import ROLES, Finding
from ntkfl.version import __version__

# What is tried, in order.
ATTACKS: dict[str, Callable[[Capture, int], list[Finding]]] = {
    "rows": rows.attack,
    "membership": membership.attack,
    "sums": sums.attack,
}


@dataclass(frozen=True)
class Study:
    """What was found in one round of one configuration."""

    capture: Capture
    findings: list[Finding]
    seconds: float

    def dump(self) -> dict[str, Any]:
        """Plain values for JSON."""
        config = self.capture.config
        return {
            "round": self.capture.round,
            "clients": len(self.capture.cohort),
            "settings": {"method": self.capture.method.name, "dataset": config.data.dataset, "seed": config.seed},
            "verdicts": verdicts(self.capture, self.findings),
            "findings": [finding.dump() for finding in self.findings],
            "seconds": round(self.seconds, 1),
            "ntkfl": __version__,
            "torch": torch.__version__,
            "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        }


def study(
    capture: Capture, *, seed: int = 0, say: Callable[[str], None] = lambda line: None, more: Sequence[Finding] = ()
) -> Study:
    """Run every attack that applies; `say` hears which is under way. `more` are findings on something else than the
    round, the final model say.
    """
    began, found = time.perf_counter(), list[Finding]()
    for name in ("sums",) if capture.masked else ATTACKS:  # nothing else is of a total
        say(name)
        found += ATTACKS[name](capture, seed)
    return Study(capture, [*found, *more], time.perf_counter() - began)


def verdicts(capture: Capture, findings: Sequence[Finding]) -> dict[str, str]:
    """A line for each role: the most it learns of each thing, in plain words."""
    lines = {}
    for role in ROLES:
        most: dict[str, Finding] = {}
        for f in findings:
            if f.role == role and (f.recovers not in most or f.success > most[f.recovers].success):
                most[f.recovers] = f
        parts = [
            f"{_amount(f)} of {f.recovers} ({f.attack}: {f.measure} {f.mean:.2f}, a guess {f.guess:.2f})"
            for f in most.values()
        ]
        besides = "besides what the aggregator does, " if "+" in role else ""
        lines[role] = f"learns {besides}{'; '.join(parts)}." if parts else _without_attack(role, capture)
        members = [f.attack for f in findings if f.role == role and f.recovers == "who was trained on"]
        if members and not capture.reply.sampled and all("by loss" in attack for attack in members):
            lines[role] += " Membership was attacked by losses alone: attacks on sums need a linear first layer."
    return lines


def _amount(finding: Finding) -> str:
    """How much of it, in words."""
    share = 0.0 if abs(finding.mean - finding.guess) < 0.02 else finding.success  # where a guess knows nearly all
    if share < 0.1:
        return "next to nothing"
    return "a part" if share < 0.5 else "much" if share < 0.9 else "nearly all"


def _without_attack(role: str, capture: Capture) -> str:
    """What a role that no attack was found for learns by its part in the protocol."""
    if role == "aggregator+shuffler" and capture.masked:
        promised = capture.task.privacy.epsilon is not None
        void = " ε counts on the two not colluding and does not hold against them." if promised else ""
        return f"opens every client's reply, by name: masks hide nothing from the two together.{void}"
    if role == "aggregator+shuffler" and capture.task.privacy.shuffle:
        return "learns who sent every row, and else what the aggregator does."
    if role.startswith("aggregator"):
        return "has the total alone." if capture.masked else "learns what the aggregator does."
    if role == "secure-sum":
        return "has no part: what clients send here does not add up."
    if role == "shuffler" and not (capture.masked or capture.task.privacy.shuffle):
        return "has no part."
    return "learns who takes part, when, and how much they send; no content."
