"""The comparison with rivals: nothing is reported on what chose, and all methods may choose as much."""

from __future__ import annotations

import math
from pathlib import Path

from ntkfl.compare.spec import Comparison

CONFIGS = Path(__file__).parents[2] / "configs"


def test_equal_budgets_and_seeds_that_chose_nothing() -> None:
    search, report = (Comparison.read(CONFIGS / f"{name}.toml") for name in ("rivals-search", "rivals"))
    for entry in search.methods:
        assert 25 <= math.prod(map(len, entry.grid.values())) <= 27, entry.label
        assert all(len(values) >= 3 for values in entry.grid.values()), entry.label  # else no value is inside
    assert not {*search.search.seed, *search.seeds} & {*report.seeds}
    assert (search.data, search.clients_per_round) == (report.data, report.clients_per_round)


def test_what_is_searched_is_what_is_reported() -> None:
    """Every method that was searched stands in the report, with a value for each option that was."""
    search, report = (Comparison.read(CONFIGS / f"{name}.toml") for name in ("rivals-search", "rivals"))
    for entry in search.methods:
        own = [
            other.method
            for other in report.methods
            if other.method["name"] == entry.method["name"] and other.method.get("fisher") == entry.method.get("fisher")
        ]
        assert own, entry.label
        for method in own:
            if entry.method["name"] != "sum-ntk-fl":  # stands there with its defaults
                assert set(entry.grid) <= set(method), entry.label
