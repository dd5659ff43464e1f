"""What is said of curves follows from the curves: hand-made ones with known answers."""

from __future__ import annotations

from typing import Any

import pytest
from ntkfl_experiments.paper.curves import (
    ahead,
    fewer_rounds,
    judge_five,
    level,
    near_centralised,
)
from ntkfl_experiments.paper.settings import CENTRAL, FEDAVG, NOVA, OURS, PAPER, SHARE

LENGTH = 40
Curves = dict[str, dict[str, Any]]


def curve(*seeds: list[float], steps: list[float] | None = None, grid: tuple[float, ...] = (100, 2000)) -> Any:
    chosen = [steps for _ in seeds] if steps else None
    return {"accuracy": list(seeds), "steps": chosen, "setting": {"steps": list(grid), "lr": 0.01}}


def rise(at: int, low: float = 0.5, high: float = 0.9) -> list[float]:
    """`low` before round `at`, `high` from it on."""
    return [low] * (at - 1) + [high] * (LENGTH - at + 1)


def five(paper: int = 2, ours: int = 1, end: float = 0.9, floor: int = 10) -> Curves:
    """`floor` of the 40 rounds at the shortest t."""
    return {
        CENTRAL: curve(rise(1)),
        PAPER: curve(rise(paper, high=end), steps=[100.0] * floor + [2000.0] * (LENGTH - floor)),
        OURS: curve(rise(ours)),
        SHARE: curve(rise(20, high=0.85)),
        NOVA: curve(rise(20, high=0.8)),
        FEDAVG: curve(rise(20, high=0.8)),
    }


def test_the_level_is_the_mean_of_the_last_five_rounds_over_seeds() -> None:
    assert level(curve([0.0] * 5 + [0.2, 0.4, 0.6, 0.8, 1.0], [0.0] * 5 + [0.0] * 5)) == pytest.approx(0.3)


@pytest.mark.parametrize(("paper", "holds"), [(2, True), (3, False)])
def test_an_order_of_magnitude_is_ten_times_from_first_hit_to_first_hit(paper: int, holds: bool) -> None:
    """FedAvg is at its level from round 20 of 40 on: against the 40 rounds of its run, round 3 would pass too."""
    found = fewer_rounds(five(paper=paper))
    assert found.holds is holds
    assert "rounds 20" in found.ours


def test_a_level_never_reached_does_not_hold() -> None:
    found = fewer_rounds(five(end=0.6))
    assert found.holds is False
    assert "NTK-FL (paper) not in every seed" in found.ours


def test_ahead_means_ahead_of_all_three() -> None:
    assert ahead(five()).holds is True
    assert ahead(five(end=0.84)).holds is False


@pytest.mark.parametrize(("end", "holds"), [(0.885, True), (0.87, False), (0.95, True)])
def test_close_to_centralised_means_at_most_two_points_below(end: float, holds: bool) -> None:
    assert near_centralised(five(end=end)).holds is holds


def labelled(curves: Curves) -> dict[str, Any]:
    return {"curves": [{"label": label, **own} for label, own in curves.items()]}


def test_an_items_data_are_judged_as_they_are_kept() -> None:
    claims, beside = judge_five(labelled(five()))
    assert [claim.holds for claim in claims] == [True, True, True, True, None]
    assert len(beside) == 1
