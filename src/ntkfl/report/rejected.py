"""What rounds had to leave out, and how many clients failed or were Byzantine, as a run's records tell it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ntkfl.federation.run_folder import Record

_REASONS = 8  # of a kind, told apart; the rest together
_REST = "other reasons"
_LONGEST = 120  # characters of a reason: a client may say anything

# What is counted: the kind as the page says it, the record's field, and what there are so many of.
KINDS = (
    ("rejected", "rejected", "rows"),
    ("rows made up", "made_up_rows", "rows"),
    ("rows trimmed", "trimmed_rows", "rows"),
    ("rows scaled down", "clipped_rows", "rows"),
    ("clients scaled down", "clipped_clients", "clients"),
    ("clients with something rejected", "rejected_clients", "clients"),
    ("Byzantine clients", "byzantine", "clients"),
    ("clients that failed", "failed", "clients"),
    ("the solver's way out", "solver_fallback", "rounds"),
)


def rejections(records: Sequence[Record]) -> tuple[list[dict[str, Any]], dict[str, list[float | None]]]:
    """Lines of a table, and by each line's `series` its count of every round; both empty where nothing happened.

    A line has `kind`, `why`, what it counts (`of`), `total`, in how many `rounds`, and the `first`.
    """
    lines: list[dict[str, Any]] = []
    series: dict[str, list[float | None]] = {}
    for kind, field, unit in KINDS:
        counts = [_counts(record.get(field)) for record in records]
        totals = sum(counts, Counter[str]())
        kept = [why for why, _ in totals.most_common(_REASONS)]
        folded = [Counter[str]() for _ in counts]
        for own, whole in zip(folded, counts, strict=True):
            for why, count in whole.items():
                own[why if why in kept else _REST] += count
        for why in dict.fromkeys([*kept, *([_REST] if len(totals) > _REASONS else [])]):
            values: list[float | None] = [own[why] for own in folded]
            at = [i for i, count in enumerate(values) if count]
            name = f"rejected/{kind}/{why}"
            first, total = records[at[0]].get("round", at[0] + 1), sum(own[why] for own in folded)
            line = {"series": name, "kind": kind, "why": why, "of": unit}
            lines.append(line | {"total": total, "rounds": len(at), "first": first})
            series[name] = values
    return lines, series


def _counts(value: object) -> Counter[str]:
    """How often, by reason: of a number or a list of clients there is none, a text is one, names have a reason each."""
    if isinstance(value, bool) or value is None:
        return Counter()
    if isinstance(value, int):
        return Counter({"": value}) if value > 0 else Counter()
    if isinstance(value, str):
        return Counter({value[:_LONGEST]: 1}) if value else Counter()
    if isinstance(value, list):
        return Counter({"": len(value)}) if value else Counter()
    found: Counter[str] = Counter()
    for name, what in value.items() if isinstance(value, Mapping) else ():
        if isinstance(what, int) and not isinstance(what, bool) and what > 0:
            found[str(name)[:_LONGEST]] += what
        elif isinstance(what, str):
            found[what[:_LONGEST]] += 1
    return found
