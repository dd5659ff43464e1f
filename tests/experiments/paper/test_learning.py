"""What is said of curves follows from the curves: hand-made rows with known answers."""

from __future__ import annotations

import dataclasses

import pytest
from ntkfl_experiments.paper.learning import ahead, chosen_t, fewer_rounds, first_at, kept, level, near_centralised
from ntkfl_experiments.paper.settings import CENTRAL, FEDAVG, NOVA, OURS, PAPER, SHARE

from ntkfl.compare.results import Row

LENGTH = 40


def row(label: str, *curves: list[float], steps: list[float] | None = None) -> Row:
    chosen: list[float | None] = list(steps or []) or [None] * len(curves[0])
    return Row(
        label, {"steps": [100.0, 2000.0], "lr": 0.01}, list(range(len(curves))), len(curves[0]), list(curves),
        list(curves), [[1.0] * len(c) for c in curves], [[1.0] * len(c) for c in curves], [], [], [""] * len(curves),
        ["cpu"], [chosen for _ in curves],
    )  # fmt: skip


def rise(at: int, low: float = 0.5, high: float = 0.9) -> list[float]:
    """`low` before round `at`, `high` from it on."""
    return [low] * (at - 1) + [high] * (LENGTH - at + 1)


def five(paper: int = 2, ours: int = 1, end: float = 0.9) -> list[Row]:
    return [
        row(CENTRAL, rise(1)),
        row(PAPER, rise(paper, high=end), steps=[100.0] * 10 + [2000.0] * 30),
        row(OURS, rise(ours)),
        row(SHARE, rise(20, high=0.85)),
        row(NOVA, rise(20, high=0.8)),
        row(FEDAVG, rise(20, high=0.8)),
    ]


def test_the_level_is_the_mean_of_the_last_five_rounds_over_seeds() -> None:
    assert level(row("x", [0.0] * 5 + [0.2, 0.4, 0.6, 0.8, 1.0], [0.0] * 5 + [0.0] * 5)) == pytest.approx(0.3)
    assert level(row("x", [0.2] * 5 + [0.9] * 5), at=5) == pytest.approx(0.2)


def test_first_crossings_are_averaged_and_one_seed_that_never_arrives_voids_them() -> None:
    assert first_at(row("x", rise(3), rise(7)), 0.9) == 5
    assert first_at(row("x", rise(3), [0.5] * LENGTH), 0.9) is None


@pytest.mark.parametrize(("paper", "agrees"), [(4, True), (5, False)])
def test_an_order_of_magnitude_is_ten_times(paper: int, agrees: bool) -> None:
    assert fewer_rounds(five(paper=paper)).agrees is agrees


def test_a_level_never_reached_is_no_agreement() -> None:
    found = fewer_rounds(five(end=0.6))
    assert found.agrees is False
    assert "never" in found.ours


def test_ahead_means_ahead_of_all_three() -> None:
    assert ahead(five()).agrees is True
    found = ahead(five(end=0.84))
    assert found.agrees is False
    assert "DataShare, FedNova, FedAvg" in found.note  # ours, at 0.9


@pytest.mark.parametrize(("end", "agrees"), [(0.885, True), (0.87, False), (0.95, False)])
def test_close_to_centralised_means_two_points_either_way(end: float, agrees: bool) -> None:
    assert near_centralised(five(end=end)).agrees is agrees


def test_the_chosen_steps_are_counted() -> None:
    found = chosen_t(five())
    assert "median 2000, from 100 to 2000 over 40 rounds" in found.ours
    assert "75%" in found.note


def test_results_keep_every_seed_and_the_search() -> None:
    rows = [dataclasses.replace(r, failed=["diverged"]) for r in five()[:1]]
    (one,) = kept(rows, {CENTRAL: {"searched": {"lr": [0.1]}, "still_at_edge": ["lr"]}})
    assert one["accuracy"] == [[0.9] * LENGTH]
    assert (one["searched"], one["at_edge"], one["failed"], one["steps"]) == ({"lr": [0.1]}, ["lr"], ["diverged"], None)
