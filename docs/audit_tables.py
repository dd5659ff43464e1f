"""Tables of docs/audit.md, from the files that `ntkfl audit --tradeoff` wrote."""

from __future__ import annotations

import json
import statistics
from typing import Any

from result_tables import RESULTS, table

_NONE = "–"


def tradeoff() -> str:
    """Rows, projected or noisy, and FedAvg: accuracy at round 10 and what each attack has from it."""
    columns = ["picture", "picture, with a client", "label", "member, by loss", "member, by rows"]
    headers = ["picture (SSIM)", "with a client's help", "labels", "membership by loss", "by looking rows up"]
    return _leaks("tradeoff", columns, headers)


def defences() -> str:
    """Sums, secure sums and private sums, likewise."""
    columns = ["picture", "class mix", "member, by loss", "member, by sums", "member, by alignment"]
    headers = ["picture (SSIM)", "class counts", "membership by loss", "by gradient's span", "by alignment"]
    return _leaks("defences", columns, headers)


def _leaks(name: str, columns: list[str], headers: list[str]) -> str:
    rows = json.loads((RESULTS / "audit" / name / "results.json").read_text())["rows"]
    lines = [
        [row["label"], f"{100 * statistics.mean(row['accuracy']):.1f}", *(_leak(row["leaks"], c) for c in columns)]
        for row in rows
    ]
    return table(["configuration", "accuracy", *headers], lines)


def _leak(leaks: dict[str, Any], column: str) -> str:
    """Its mean over seeds, and in brackets what a guess scores where that is not 0; of updates the class mix stands
    for labels.
    """
    named = column == "label" and column not in leaks and "class mix" in leaks
    found = leaks.get("class mix" if named else column)
    if not found:
        return _NONE
    score, guess = (statistics.mean(pair[i] for pair in found) for i in (0, 1))
    brackets = f" ({_short(guess)})" if round(guess, 2) else ""
    return f"{'class mix ' if named else ''}{_short(score)}{brackets}"


def _short(value: float) -> str:
    """0.49 → .49, −0.01 → −.01."""
    text = f"{abs(value):.2f}"
    sign = "−" if value < 0 and float(text) else ""
    return sign + (text[1:] if text.startswith("0.") else text)
