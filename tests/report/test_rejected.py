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


def test_clients_that_did_not_answer_are_counted_and_the_wait_for_them() -> None:
    """Unnamed ones behind a shuffler; those that `failed` names are counted there, and not once more."""
    records: list[dict[str, Any]] = [
        {"round": 1, "asked": 4, "answered": 4},
        {"round": 2, "asked": 4, "answered": 3, "failed_attempts": ["too few"]},
        {"round": 3, "asked": 4, "answered": 2, "failed": {"a": "no answer"}},
        {"round": 4, "asked": "many", "answered": None},
    ]
    timings = [{"seconds": 5.0}, {"seconds": 42.0, "waited_seconds": 36.6}, {"seconds": 42.0, "waited_seconds": 30.0}]
    lines, series = rejections(records, timings)
    assert series["rejected/clients that did not answer/"] == [0, 1, 1, 0]
    assert series["rejected/seconds waited for them/"] == [0, 37, 30, 0]
    assert {(line["kind"], line["of"], line["total"]) for line in lines} == {
        ("clients that failed", "clients", 1),
        ("clients that did not answer", "clients", 2),
        ("seconds waited for them", "seconds", 67),
        ("attempts at a round that failed", "attempts", 1),
    }


def test_nothing_where_there_is_nothing() -> None:
    assert rejections([{"round": 1, "byzantine": [], "made_up_rows": 0}, {"round": 2, "rejected": {}}]) == ([], {})
    assert rejections([]) == ([], {})


def test_many_reasons_are_the_commonest_and_the_rest_together() -> None:
    """Clients say what they like: a page of a thousand reasons would be no page."""
    lines, _ = rejections([{"round": 1, "failed": {f"c{i}": f"reason {i // 2}" for i in range(40)}}])
    assert len(lines) == 9
    assert lines[-1]["why"] == "other reasons"
    assert lines[-1]["total"] == 40 - 8 * 2
    assert sum(line["total"] for line in lines) == 40
    assert len(rejections([{"round": 1, "failed": {"c": "x" * 9999}}])[0][0]["why"]) < 200


def test_what_is_not_as_it_should_be_is_left_out() -> None:
    for value in (True, -3, 2.5, {"x": [1]}, {"x": True}, {"x": -1}):
        assert rejections([{"round": 1, "rejected": value}]) == ([], {})
