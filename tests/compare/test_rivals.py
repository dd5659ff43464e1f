"""The comparison with rivals: nothing is reported on what chose, and all methods may choose as much."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ntkfl.compare.spec import Comparison

CONFIGS = Path(__file__).parents[2] / "configs"
SEARCHES = [CONFIGS / f"{name}.toml" for name in ("rivals-search", "rivals-search-slow")]
COMPARISONS = [path for path in sorted(CONFIGS.rglob("*.toml")) if "[[methods]]" in path.read_text()]


@pytest.mark.parametrize("path", COMPARISONS, ids=lambda path: path.stem)
def test_every_published_comparison_can_be_read(path: Path) -> None:
    """An option that is renamed or gone leaves none of them behind."""
    assert Comparison.read(path).methods


def test_equal_budgets_and_seeds_that_chose_nothing() -> None:
    """And every method that was searched stands in the report, with a value for each option that was."""
    report = Comparison.read(CONFIGS / "rivals.toml")
    for search in map(Comparison.read, SEARCHES):
        for entry in search.methods:
            settings = math.prod(map(len, entry.grid.values()))
            assert 25 <= settings <= 27 or (len(entry.grid) == 1 and settings == 5), entry.label
            assert all(len(values) >= 3 for values in entry.grid.values()), entry.label  # else no value is inside
            own = [other.method for other in report.methods if _like(other.method) == _like(entry.method)]
            assert own, entry.label
            for method in own:
                if entry.method["name"] != "sum-ntk-fl":  # stands there with its defaults
                    assert set(entry.grid) <= set(method), entry.label
        assert not {*search.search.seed, *search.seeds} & {*report.seeds}
        assert (search.data, search.clients_per_round) == (report.data, report.clients_per_round)
        assert (search.search.rounds or ())[:2] == (6, 20)
        assert search.search.keep == 0.25


def _like(method: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes it another method under the same name."""
    return tuple(method.get(option) for option in ("name", "scheme"))
