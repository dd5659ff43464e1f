"""The comparison with rivals: nothing is reported on what chose, and all methods may choose as much."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ntkfl.compare.spec import Comparison

CONFIGS = Path(__file__).parents[2] / "configs"
COMPARISONS = [path for path in sorted(CONFIGS.rglob("*.toml")) if "[[methods]]" in path.read_text()]


@pytest.mark.parametrize("path", COMPARISONS, ids=lambda path: path.stem)
def test_every_published_comparison_can_be_read(path: Path) -> None:
    """An option that is renamed or gone leaves none of them behind."""
    assert Comparison.read(path).methods


def test_equal_budgets_and_seeds_that_chose_nothing() -> None:
    """Every rival may try as many settings, batch sizes and local steps among them, on seeds that are not reported."""
    headline = Comparison.read(CONFIGS / "headline.toml")
    rivals = {entry.label: entry.grid for entry in headline.methods if "batch_size" in entry.grid}
    assert set(rivals) == {"FedPM", "FedAdam", "SCAFFOLD", "FedAvg"}
    for label, grid in rivals.items():
        assert math.prod(map(len, grid.values())) == 24, label
        assert {"lr", "local_steps"} <= set(grid), label
    assert not {*headline.search.seed} & {*headline.seeds}
