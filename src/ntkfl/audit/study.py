"""All attacks on one configuration, each beside the same attack on the configuration without its defences."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ntkfl.audit import labels, linkage, membership, projection, reconstruction, sums
from ntkfl.audit.capture import Capture
from ntkfl.audit.deep_leakage import Settings
from ntkfl.audit.finding import ROLES, Finding
from ntkfl.audit.views import views
from ntkfl.federation.build import build_method
from ntkfl.federation.config import RunConfig
from ntkfl.version import __version__

Say = Callable[[str], None]
_REFERENCE_CLIENTS = 3
# What is tried, in order, and its part of the time: on the undefended, quickly, in full.
STAGES: dict[str, tuple[float, float, float]] = {
    "analytic inversion": (1, 1, 2),
    "deep leakage": (2, 4, 20),
    "deep leakage of a gradient": (0, 0, 2),
    "projection": (0, 2, 2),
    "labels": (0, 0.2, 0.2),
    "senders": (0, 1, 2),
    "membership": (0.1, 1.5, 1.5),
    "sums": (2, 3, 30),
}
# Options of a method that hide something, and what switches each off.
_OFF: dict[str, Any] = {
    "projected_dim": None, "sparsity": 0.0, "values": "float32", "shuffle": False, "clip": None, "noise": 0.0,
    "codec": "factored", "secure_sum": False, "epsilon": None, "noise_clients": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Study:
    """What was found in one round of one configuration. `sees` and `verdicts` have a sentence for each role."""

    capture: Capture
    findings: list[Finding]
    sees: dict[str, str]
    verdicts: dict[str, str]
    seconds: float
    settings: dict[str, Any] = field(default_factory=dict)

    def dump(self) -> dict[str, Any]:
        return {
            "round": self.capture.round,
            "clients": len(self.capture.cohort),
            "settings": self.settings,
            "verdicts": self.verdicts,
            "sees": self.sees,
            "findings": [finding.dump() for finding in self.findings],
            "seconds": round(self.seconds, 1),
            "ntkfl": __version__,
            "torch": torch.__version__,
            "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        }


def undefended(config: RunConfig) -> RunConfig:
    """The same task with every stage of hiding switched off, and few clients: what the attacks do then."""
    method = build_method(config.method)
    options = method.model_dump(mode="json")
    known = {name: value for name, value in options.items() if name in type(method).model_fields}
    stripped = {name: value for name, value in known.items() if name not in _OFF}
    stripped |= {name: value for name, value in _OFF.items() if name in known and value is not None}
    if method.shows == "rows":  # attacks are on single rows: a few tell
        stripped["subsample_rate"] = min(method.subsample_rate, 0.15)
    stripped |= dict.fromkeys({"projected_dim", "epsilon"} & known.keys())  # of these none is said, not left out
    few = min(_REFERENCE_CLIENTS, config.clients_per_round)
    return config.model_copy(
        update={"method": {"name": method.name} | stripped, "clients_per_round": few, "rounds": 1, "stop_at": None}
    )


def study(
    capture: Capture,
    reference: Capture | None = None,
    *,
    earlier: Sequence[Capture] = (),
    quick: bool = False,
    seed: int = 0,
    say: Say | None = None,
    settings: dict[str, Any] | None = None,
    more: Sequence[Finding] = (),
) -> Study:
    """Run every attack that applies; `reference` is a capture without defences, `say` hears what is being done.

    `more` are findings on something else than the round, the final model say.
    """
    began = time.perf_counter()
    against = {} if reference is None else _index(_attacks(reference, (), True, seed, _prefixed(say, "undefended: ")))
    found = [*_attacks(capture, earlier, quick, seed, say or (lambda line: None)), *more]
    defended = reference is not None and _defences(capture) != _defences(reference)
    compared = [
        f.against(against[f.attack, f.measure]) if defended and (f.attack, f.measure) in against else f for f in found
    ]
    lines = verdicts(capture, compared)
    return Study(capture, compared, views(capture), lines, time.perf_counter() - began, dict(settings or {}))


def judged(findings: Sequence[Finding]) -> list[Finding]:
    """Those that a role is judged by. Known inputs, and many clients that collude, are more than curiosity or a pair,
    and sums of a chosen number of samples are not what was sent: they stand in the table alone.
    """
    return [f for f in findings if not f.attack.endswith(("known pairs", "collude", "sample", "samples"))]


def verdicts(capture: Capture, findings: Sequence[Finding]) -> dict[str, str]:
    """One line a role: the worst it does, in plain words."""
    lines = {}
    curious = judged(findings)
    for role in ROLES:
        own = [f for f in curious if f.role == role]
        if role.startswith("aggregator+"):  # a pair knows at least what one of them does
            own += [f for f in curious if f.role == "aggregator"]
        worst: dict[str, Finding] = {}
        for f in own:
            kind = _kind(f)
            if kind not in worst or f.success > worst[kind].success:
                worst[kind] = f
        parts = [
            f"{_amount(f)} {kind} ({f.attack}: {f.measure} {f.mean:.2f}, a guess {f.guess:.2f})"
            for kind, f in worst.items()
        ]
        lines[role] = "learns " + "; ".join(parts) + "." if parts else _without_attack(role, capture)
        if role == "aggregator+shuffler" and capture.method.shuffle:
            lines[role] = "learns who sent every row; beyond that, " + lines[role].removeprefix("learns ")
    return lines


def _attacks(capture: Capture, earlier: Sequence[Capture], quick: bool, seed: int, say: Say) -> list[Finding]:
    few, many = (6, 20) if quick else (10, 60)
    settings = Settings(steps=40, restarts=1) if quick else Settings(steps=80, restarts=3)
    attacks: dict[str, Callable[[], list[Finding]]] = {
        "analytic inversion": lambda: reconstruction.analytic(capture, seed, count=many),
        "deep leakage": lambda: reconstruction.deep(capture, seed, count=few, settings=settings),
        "deep leakage of a gradient": lambda: [] if quick else reconstruction.deep_sum(capture, seed),
        "projection": lambda: projection.attack(capture, seed),
        "labels": lambda: labels.attack(capture, seed),
        "senders": lambda: linkage.attack(capture, seed, earlier=earlier),
        "membership": lambda: membership.attack(capture, seed),
        "sums": lambda: sums.attack(capture, seed, quick=quick),
    }
    found: list[Finding] = []
    for name in ("sums",) if capture.masked else STAGES:  # nothing else is of a total
        say(name)
        found += attacks[name]()
    return found


def _defences(capture: Capture) -> dict[str, Any]:
    """The method's options, without what `undefended` sets for speed alone and exact codecs; halves hide nothing."""
    options = capture.method.model_dump(mode="json", exclude={"subsample_rate", "codec"})
    return options | ({"values": "float32"} if options.get("values") == "float16" else {})


def _index(findings: Sequence[Finding]) -> dict[tuple[str, str], Finding]:
    return {(f.attack, f.measure): f for f in reversed(findings)}


def _prefixed(say: Say | None, prefix: str) -> Say:
    return (lambda line: say(prefix + line)) if say else (lambda line: None)


def _kind(finding: Finding) -> str:
    """What a finding is about, in two or three words."""
    text = finding.recovers
    if "label" in text or "class" in text:
        return "of the labels"
    if "sender" in text or "who sent" in text:
        return "of who sent what"
    if "trained on" in text:
        return "of who was trained on"
    if "mean" in text:
        return "of the inputs' mean"
    return "of the projected inputs" if "projected" in text else "of the inputs"


def _amount(finding: Finding) -> str:
    share = finding.success
    if share < 0.1:
        return "next to nothing"
    return "a part" if share < 0.5 else "much" if share < 0.9 else "nearly all"


def _without_attack(role: str, capture: Capture) -> str:
    if role.startswith("aggregator") and capture.masked:
        if role != "aggregator+shuffler" or not capture.unmasked_by_pair:
            return "has the total alone."
        promised = getattr(capture.method, "epsilon", None) is not None
        void = " ε counts on the two not colluding and does not hold against them." if promised else ""
        return f"opens every client's reply, by name: masks hide nothing from the two together.{void}"
    if role == "shuffler" and capture.masked:
        return "learns who takes part; sealed vectors and masks, no content."
    if role == "shuffler":
        return (
            "learns who takes part, and not how many samples each uses, as all send equally many rows; no content."
            if capture.method.shuffle
            else "has no part."
        )
    if role.startswith("secure-sum"):
        return "has no part: what clients send here does not add up."
    if role == "key-server":
        return "learns who takes part; no row, so nothing of the data by itself."
    return "learns who takes part, when, and how much they send; no content."
