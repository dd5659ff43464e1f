"""What rounds had to leave out, and how many clients failed or were Byzantine, as a run's records tell it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ntkfl.federation.run_folder import Record

_REASONS = 8  # of a kind, told apart; the rest together
_REST = "other reasons"
_LONGEST = 120  # characters of a reason: a client may say anything

# What is counted: the kind as the page says it, the record's field, and the unit it is counted in.
KINDS = (
    ("rejected", "rejected", "rows"),
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
        named = [why for why, _ in sum(counts, Counter[str]()).most_common(_REASONS) if why != _REST]
        by_reason = {why: [count[why] for count in counts] for why in named}
        rest = [count.total() - sum(count[why] for why in named) for count in counts]
        for why, values in (by_reason | {_REST: rest}).items():
            at = [i for i, value in enumerate(values) if value]
            if not at:
                continue
            name = f"rejected/{kind}/{why}"
            first = records[at[0]].get("round", at[0] + 1)
            line = {"series": name, "kind": kind, "why": why, "of": unit}
            lines.append(line | {"total": sum(values), "rounds": len(at), "first": first})
            series[name] = list(values)
    return lines, series


def _counts(value: object) -> Counter[str]:
    """How often, by reason: of a number or a list of clients there is none, a text is one, names have a reason each."""
    if isinstance(value, Mapping):
        found: Counter[str] = Counter()
        for name, what in value.items():
            reason = what if isinstance(what, str) else str(name)
            found[reason[:_LONGEST]] += 1 if isinstance(what, str) else _whole(what)
        return +found
    if isinstance(value, str):
        return +Counter({value[:_LONGEST]: bool(value)})
    return +Counter({"": len(value) if isinstance(value, list) else _whole(value)})


def _whole(value: object) -> int:
    return value if type(value) is int else 0
