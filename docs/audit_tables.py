"""The table of docs/audit.md, from the findings that `make leaks` wrote."""

from __future__ import annotations

import json
from typing import Any

from result_tables import RESULTS, table

# What is sent, and the file of its findings.
SENT = {
    "rows (ntk-fl)": "rows",
    "rows, projected, sparse, shuffled (cp-ntk-fl)": "cp",
    "sums": "sums",
    "sums of 20 clients, masked (--secure-sum)": "secure-sums",
    "masked and noisy, ε = 3 (--private)": "private-sums",
}
# Columns: what a finding recovers.
_KINDS = {
    "pictures (SSIM)": "inputs",
    "labels": "labels",
    "who took part": "who was trained on",
    "rows of one client": "who sent a row",
}


def strongest(name: str, recovers: str) -> dict[str, Any] | None:
    """The finding that recovers this best."""
    findings = json.loads((RESULTS / "audit" / f"{name}.json").read_text())["findings"]
    found = [f for f in findings if f["recovers"] == recovers and f["measure"] != "relative error"]
    return max(found, key=lambda f: float(f["success"]), default=None)


def leaks() -> str:
    lines = [[what, *(_cell(strongest(name, kind)) for kind in _KINDS.values())] for what, name in SENT.items()]
    return table(["what is sent", *_KINDS], lines)


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    guess = f" ({found['guess']:.2f})" if round(found["guess"], 2) else ""
    return f"{found['mean']:.2f}{guess}".replace("-", "−")
