"""Thinning changes nothing that a table says."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ntkfl.report.thin import thin


def view(accuracy: list[float | None]) -> dict[str, Any]:
    count = len(accuracy)
    series = {
        "test_accuracy": accuracy,
        "uplink_bytes": [i + 1 for i in range(count)],
        "steps": [7 * i for i in range(count)],
    }
    return {"rounds": list(range(1, count + 1)), "series": series}


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=300), st.integers(2, 40), st.floats(0, 1))
def test_what_tables_say_stays(accuracy: list[float | None], most: int, target: float) -> None:
    whole, less = view(accuracy), thin(view(accuracy), most)

    def reached(shown: dict[str, Any]) -> tuple[int, int] | None:
        total = list(accumulate(shown["series"]["uplink_bytes"]))
        pairs = zip(shown["rounds"], shown["series"]["test_accuracy"], total, strict=True)
        return next(((r, t) for r, a, t in pairs if a is not None and a >= target), None)

    assert reached(less) == reached(whole)
    assert less["rounds"][0] == 1
    assert less["rounds"][-1] == len(accuracy)
    assert sum(less["series"]["uplink_bytes"]) == sum(whole["series"]["uplink_bytes"])
    assert less["series"]["steps"] == [7 * (r - 1) for r in less["rounds"]]


def test_a_long_run_is_short_and_a_short_one_whole() -> None:
    flat: list[float | None] = [0.5] * 10_000
    less = thin(view(flat), 100)
    assert 60 < len(less["rounds"]) <= 101
    assert less["rounds"][:5] == [1, 2, 3, 4, 5] or less["rounds"][1] == 2
    assert less["of"] == 10_000
    assert thin(view(flat[:100]), 100) == view(flat[:100])
