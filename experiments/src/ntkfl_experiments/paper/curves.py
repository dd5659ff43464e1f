"""What accuracy curves say of the paper's claims: levels, first hits, and their ratios over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ntkfl_experiments.paper.item import Beside, Findings, Verdict
from ntkfl_experiments.paper.settings import CENTRAL, FEDAVG, NOVA, OURS, PAPER, SHARE

TAIL = 5  # rounds whose mean is a curve's level: single rounds of averaging methods swing by points
CLOSE = 2.0  # points of accuracy that we call close, or slight: the paper has no number
PINNED = 0.5  # of the rounds at the shortest t of the grid: more, and the curve shows the grid, not the method

Curve = Mapping[str, Any]  # a method's row as `kept` has it


def primed(label: str) -> str:
    """The label of a method with subsampling and projection."""
    return label.replace("NTK-FL", "NTK-FL'") if "NTK-FL" in label else label + "'"


def level(curve: Curve) -> float:
    """Mean over seeds of the last `TAIL` rounds."""
    return statistics.mean(levels(curve))


def levels(curve: Curve) -> list[float]:
    """The same, a number per seed."""
    return [statistics.mean(seed[-TAIL:]) for seed in curve["accuracy"] if seed]


def first_hits(curve: Curve, targets: Sequence[float]) -> list[int | None]:
    """For each seed the first round at or above its target; None where it never is."""
    return [
        next((i + 1 for i, a in enumerate(seed) if a >= target), None)
        for seed, target in zip(curve["accuracy"], targets, strict=True)
    ]


def times_fewer(slow: Sequence[int | None], fast: Sequence[int | None]) -> tuple[float, float, float] | None:
    """How many times fewer rounds: the ratio of the mean first hits, and the least and largest of a seed's own.

    First hit against first hit, so that neither side is counted to the end of its run. None where a seed never arrives.
    """
    pairs = [(s, f) for s, f in zip(slow, fast, strict=True) if s is not None and f is not None]
    if len(pairs) < len(slow):
        return None
    each = [s / f for s, f in pairs]
    return statistics.mean(s for s, _ in pairs) / statistics.mean(f for _, f in pairs), min(each), max(each)


def pinned(curve: Curve) -> float:
    """The part of rounds that chose the shortest t of the grid."""
    chosen = [float(t) for seed in curve["steps"] for t in seed if t is not None]
    shortest = float(min(curve["setting"]["steps"]))
    return sum(t == shortest for t in chosen) / len(chosen)


def judge_figure3(data: Mapping[str, Any]) -> Findings:
    at = {curve["label"]: curve for curve in data["curves"]}
    drops = {
        label: [100 * (a - b) for a, b in zip(levels(at[label]), levels(at[primed(label)]), strict=True)]
        for label in (PAPER, OURS, FEDAVG)
    }
    mean = {label: statistics.mean(values) for label, values in drops.items()}
    more = [f - n for f, n in zip(drops[FEDAVG], drops[PAPER], strict=True)]
    text = "points lost: " + ", ".join(
        f"{label} {mean[label]:.1f} ({min(values):.1f} to {max(values):.1f})" for label, values in drops.items()
    )
    return [
        Verdict(
            "subsampling and projection cost FedAvg more accuracy than NTK-FL",
            "“causes more accuracy degradation in FedAvg … than in NTK-FL”",
            text,
            None if min(more) <= 0 < max(more) else statistics.mean(more) > 0,
            "seeds disagree on which loses more" if min(more) <= 0 < max(more) else "in every seed",
            short=f"points lost: NTK-FL {mean[PAPER]:.1f}, FedAvg {mean[FEDAVG]:.1f}",
        ),
        Verdict(
            "they cost NTK-FL little",
            "“a slight accuracy drop in NTK-FL”",
            f"NTK-FL (paper) {mean[PAPER]:.1f} points, ours {mean[OURS]:.1f}",
            mean[PAPER] <= CLOSE,
            f"slight is at most {CLOSE:g} points, as similar is; the paper has no number",
            short=f"{mean[PAPER]:.1f} points lost; slight is at most {CLOSE:g}",
        ),
    ], []


def judge_five(data: Mapping[str, Any]) -> Findings:
    at = {curve["label"]: curve for curve in data["curves"]}
    return [fewer_rounds(at), ahead(at), near_centralised(at), upper_bound(at), chosen_t(at)], [against_the_best(at)]


def _fairly(holds: bool, curve: Curve) -> tuple[bool | None, str]:
    """A failure of a curve that is held at the shortest t of its grid is the grid's: no verdict, and why."""
    if holds or pinned(curve) <= PINNED:
        return holds, ""
    return None, f"t is the shortest of its grid in {pinned(curve):.0%} of rounds: the searched η is too large for it"


def fewer_rounds(at: Mapping[str, Curve]) -> Verdict:
    goals, slow, ratios = _to_the_level(at, FEDAVG)
    text = "; ".join(
        f"{label} not in every seed" if r is None else f"{label} {r[0]:.1f} times fewer ({r[1]:.1f} to {r[2]:.1f})"
        for label, r in ratios.items()
    )
    ratio = ratios[PAPER]
    holds, why = _fairly(ratio is not None and ratio[0] >= 10, at[PAPER])
    return Verdict(
        "NTK-FL reaches FedAvg's accuracy in an order of magnitude fewer rounds",
        "“reducing the number of communication rounds by an order of magnitude compared to federated averaging”",
        f"first hits of FedAvg's own level at the end, seed by seed ({_span(goals)}; its own hits: rounds "
        f"{', '.join(map(str, slow))}): {text}",
        holds,
        why,
        "not reached" if ratio is None else f"{ratio[0]:.1f}×",
    )


def _to_the_level(
    at: Mapping[str, Curve], baseline: str
) -> tuple[list[float], list[int | None], dict[str, tuple[float, float, float] | None]]:
    """A baseline's level in each seed, its own first hits of it (clients and cohorts are the same for all), and how
    many times fewer rounds NTK-FL takes.
    """
    goals = levels(at[baseline])
    slow = first_hits(at[baseline], goals)
    return goals, slow, {label: times_fewer(slow, first_hits(at[label], goals)) for label in (PAPER, OURS)}


def ahead(at: Mapping[str, Curve]) -> Verdict:
    ends = {label: level(at[label]) for label in (PAPER, OURS, SHARE, NOVA, FEDAVG)}
    lead = 100 * (ends[PAPER] - max(ends[label] for label in (SHARE, NOVA, FEDAVG)))
    holds, why = _fairly(all(ends[PAPER] > ends[label] for label in (SHARE, NOVA, FEDAVG)), at[PAPER])
    return Verdict(
        "NTK-FL outperforms every federated baseline",
        "“outperforms all baseline FL algorithms in different scenarios”",
        f"{_tail(at)}: "
        + ", ".join(f"{label} {100 * end:.1f} %" for label, end in ends.items())
        + f"; above all of them in {_seeds_ahead(at)} seeds",
        holds,
        why or "in the mean over seeds",
        f"{lead:+.1f} points",
    )


def near_centralised(at: Mapping[str, Curve]) -> Verdict:
    gaps = _above_central(at, (PAPER, OURS))
    holds, why = _fairly(gaps[PAPER] >= -CLOSE, at[PAPER])
    return Verdict(
        "NTK-FL is close to centralised training",
        "“achieves similar test performance compared with the ideal centralized training case”",
        f"points against centralised, {_tail(at)}: " + ", ".join(f"{label} {gap:+.1f}" for label, gap in gaps.items()),
        holds,
        why or f"similar is at most {CLOSE:g} points below; the paper has no number",
        f"{gaps[PAPER]:+.1f} points",
    )


def upper_bound(at: Mapping[str, Curve]) -> Verdict:
    """Of the paper's algorithms, each round's own weights. Ours reports averaged ones, so it is said and not judged."""
    theirs = (PAPER, SHARE, NOVA, FEDAVG)
    gaps = _above_central(at, (*theirs, OURS))
    best = max(theirs, key=lambda label: gaps[label])
    each = [a > c for a, c in zip(levels(at[best]), levels(at[CENTRAL]), strict=True)]
    return Verdict(
        "centralised training on each round's cohort is an upper bound of all others",
        "“can be considered as an upper bound of all other algorithms”",
        f"nearest or above, {_tail(at)}: {best} by {gaps[best]:+.1f} points, above it in {sum(each)} of {len(each)} "
        f"seeds; {OURS}, whose weights are averaged, by {gaps[OURS]:+.1f}",
        True if gaps[best] <= 0 else (False if all(each) else None),
        "" if gaps[best] <= 0 or all(each) else "seeds disagree on which is above",
        f"{gaps[best]:+.1f} points",
    )


def _above_central(at: Mapping[str, Curve], labels: Sequence[str]) -> dict[str, float]:
    return {label: 100 * (level(at[label]) - level(at[CENTRAL])) for label in labels}


def chosen_t(at: Mapping[str, Curve]) -> Verdict:
    curve = at[PAPER]
    grid = curve["setting"]["steps"]
    steps = sorted(t for seed in curve["steps"] for t in seed if t is not None)
    top = sum(t == max(grid) for t in steps) / len(steps)
    within = min(grid) >= 100 and max(grid) < 10_000
    return Verdict(
        "the chosen number of steps is of the order of 10² to 10³",
        "“on the order of 10² to 10³”",
        f"median {statistics.median(steps):.0f} (η = {curve['setting'].get('lr', 0.01):g}); the grid's shortest in "
        f"{pinned(curve):.0%} of rounds, its longest in {top:.0%}",
        None if within else 100 <= statistics.median(steps) < 10_000,
        f"the grid has no other values: {min(grid):.0f} to {max(grid):.0f}" if within else "",
        f"median {statistics.median(steps):.0f}",
    )


def against_the_best(at: Mapping[str, Curve]) -> Beside:
    """Rounds to the level of the best federated baseline: whoever that is, not FedAvg alone."""
    best = max((SHARE, NOVA, FEDAVG), key=lambda label: level(at[label]))
    goals, _, ratios = _to_the_level(at, best)
    text = ", ".join(
        f"{label} {'not in every seed' if r is None else f'{r[0]:.1f} ({r[1]:.1f} to {r[2]:.1f})'}"
        for label, r in ratios.items()
    )
    return Beside(f"times fewer rounds than the best baseline, {best}, to its level ({_span(goals)})", text)


def _span(values: Sequence[float]) -> str:
    return f"{100 * min(values):.1f} to {100 * max(values):.1f} %"


def _tail(at: Mapping[str, Curve]) -> str:
    """Which rounds a level is of."""
    last = max(len(seed) for seed in at[PAPER]["accuracy"])
    return f"mean of rounds {max(1, last - TAIL + 1)} to {last}"


def _seeds_ahead(at: Mapping[str, Curve]) -> str:
    """In how many seeds NTK-FL (paper) is above every federated baseline."""
    own, others = levels(at[PAPER]), [levels(at[label]) for label in (SHARE, NOVA, FEDAVG)]
    return f"{sum(a > max(rest) for a, *rest in zip(own, *others, strict=True))} of {len(own)}"
