"""What a report tells of rejected rows, Byzantine clients and failures, counted by hand."""

from __future__ import annotations

from typing import Any

from ntkfl.report.rejected import rejections


def test_every_reason_is_counted_by_round() -> None:
    records: list[dict[str, Any]] = [
        {"round": 1},
        {"round": 2, "rejected": {"not finite": 3, "copied": 1}, "rejected_clients": 2, "byzantine": [4, 7]},
        {"round": 3, "byzantine": [], "failed": {"a": "no answer", "b": "no answer", "c": "bad data"}},
        {
            "round": 4,
            "rejected": {"not finite": 2},
            "rejected_clients": 1,
            "solver_fallback": "steps that were reached",
        },
    ]
    lines, series = rejections(records)
    found = {(line["kind"], line["why"]): (line["of"], line["total"], line["rounds"], line["first"]) for line in lines}
    assert found == {
        ("rejected", "not finite"): ("rows", 5, 2, 2),
        ("rejected", "copied"): ("rows", 1, 1, 2),
        ("clients with something rejected", ""): ("clients", 3, 2, 2),
        ("Byzantine clients", ""): ("clients", 2, 1, 2),
        ("clients that failed", "no answer"): ("clients", 2, 1, 3),
        ("clients that failed", "bad data"): ("clients", 1, 1, 3),
        ("the solver's way out", "steps that were reached"): ("rounds", 1, 1, 4),
    }
    assert series["rejected/rejected/not finite"] == [0, 3, 0, 2]
    assert series["rejected/clients that failed/no answer"] == [0, 0, 2, 0]
    assert sorted(series) == sorted(line["series"] for line in lines)
