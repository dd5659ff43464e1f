"""Settings are chosen on held-out clients, within bounds, and what lies at an edge is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ntkfl.compare.results import (
    search_lines,
)
from ntkfl.compare.search import describe, edges_of, search
from ntkfl.compare.spec import Comparison
from ntkfl.compare.trials import Cell
from ntkfl.federation.run_folder import RunFolder
from tests.compare.comparisons import TOML, FakeRuns, read


def test_search_follows_held_out_clients_and_extends_edges(tmp_path: Path) -> None:
    comparison = read(tmp_path, TOML.replace("extend = 1", "extend = 5"))
    runs = FakeRuns(lambda m: 0.9 - abs(m["lr"] - 2.7) / 10 - abs(m["local_steps"] - 4) / 100)
    chosen = search(comparison, comparison.methods, tmp_path / "s", runs)  # type: ignore[arg-type]
    assert chosen["FedAvg"].options == {"lr": 2.7, "local_steps": 4}
    assert chosen["FedAvg"].at_edge == []
    assert chosen["FedAvg"].tried["lr"] == [0.1, 0.3, 0.9, 2.7, 8.1]
    assert chosen["NTK-FL"].options == {}


def test_a_search_is_among_honest_clients(tmp_path: Path) -> None:
    entry = {"label": "m", "method": "fedavg", "grid": {"lr": [0.1, 0.3]}, "byzantine": {"kind": "sign-flip"}}
    comparison = Comparison(name="a", methods=[entry], search={"hold_out": 3, "rounds": [1], "extend": 0})
    seen: list[object] = []

    def run(cells: list[Cell]) -> None:
        seen.extend(cell.config.byzantine for cell in cells)
        FakeRuns(lambda m: m["lr"])(cells)

    search(comparison, comparison.methods, tmp_path / "s", run)  # type: ignore[arg-type]
    assert seen == [None, None]
    assert comparison.run(comparison.methods[0], 0, {"lr": 0.1}).byzantine is not None


def test_a_grown_grid_is_tried_next_to_its_best_alone(tmp_path: Path) -> None:
    """Of four values by four that grow to five by four: the new lr with the best number of steps and its neighbours."""
    grid = {"lr": [0.1, 0.3, 0.9, 2.7], "local_steps": [1, 2, 3, 4]}
    entry = {"label": "m", "method": "fedavg", "grid": grid}
    comparison = Comparison(name="a", methods=[entry], search={"hold_out": 3, "rounds": [1], "extend": 1})
    tried: list[tuple[float, float]] = []

    def accuracy(method: dict[str, Any]) -> float:
        tried.append((method["lr"], method["local_steps"]))
        return float(0.5 + method["lr"] / 100 - abs(method["local_steps"] - 1) / 10)

    chosen = search(comparison, comparison.methods, tmp_path / "s", FakeRuns(accuracy))  # type: ignore[arg-type]
    assert set(tried[:16]) == {(lr, steps) for lr in grid["lr"] for steps in grid["local_steps"]}
    assert sorted(set(tried[16:])) == [(8.1, 1), (8.1, 2)]
    assert chosen["m"].options == {"lr": 8.1, "local_steps": 1}


def test_a_grid_grows_no_further_than_its_options_bounds(tmp_path: Path) -> None:
    """The next value after 0.9 would be 1.6, which is no smoothing: it stays at the edge, and that is said."""
    entry = {"label": "m", "method": "fedavg", "grid": {"label_smoothing": [0.5, 0.9]}}
    comparison = Comparison(name="a", methods=[entry], search={"hold_out": 3, "rounds": [1]})
    chosen = search(comparison, comparison.methods, tmp_path / "s", FakeRuns(lambda m: m["label_smoothing"]))  # type: ignore[arg-type]
    assert chosen["m"].options == {"label_smoothing": 0.9}
    (line,) = search_lines(comparison, {"m": describe(chosen["m"], comparison.methods[0])})
    assert line == (
        "m: searched label_smoothing in {0.5, 0.9} on 3 held-out clients; "
        "chose label_smoothing 0.9, at the edge of what was tried in label_smoothing: a wider grid may have better"
    )


def test_halving_continues_only_the_best(tmp_path: Path) -> None:
    comparison = read(tmp_path, TOML.replace("extend = 1", "extend = 0"))
    runs = FakeRuns(lambda m: m["lr"] + m["local_steps"] / 100)
    search(comparison, comparison.methods, tmp_path / "s", runs)  # type: ignore[arg-type]
    lengths = sorted(len(RunFolder(p).records()) for p in (tmp_path / "s").iterdir())
    assert lengths == [1, 1, 1, 2]  # a quarter of four settings went on, from where it was


def test_a_final_rung_decides_by_late_rounds(tmp_path: Path) -> None:
    """lr 0.3 is ahead in two rounds and behind in four: with the final rung, among the best three, 0.1 is chosen."""
    early = read(tmp_path, TOML.replace("extend = 1", "extend = 0"))
    late = read(tmp_path, TOML.replace("extend = 1", "extend = 0\nfinal_rounds = 4\nfinalists = 3"))

    def run(cells: list[Cell]) -> None:
        for cell in cells:
            sign = 1 if cell.config.rounds <= 2 else -1
            FakeRuns(lambda m, sign=sign: 0.5 + sign * m["lr"] - m["local_steps"] / 100)([cell])

    chosen = [search(c, c.methods, tmp_path / str(i), run)["FedAvg"] for i, c in enumerate((early, late))]  # type: ignore[arg-type]
    assert [c.options for c in chosen] == [{"lr": 0.3, "local_steps": 2}, {"lr": 0.1, "local_steps": 2}]
    assert chosen[1].at_edge == ["local_steps", "lr"]
    lengths = sorted(len(RunFolder(p).records()) for p in (tmp_path / "1").iterdir())
    assert lengths == [1, 4, 4, 4]


@pytest.mark.parametrize(
    ("best", "grid", "expected"),
    [
        ({"lr": 0.1}, [0.01, 0.03, 0.1], [0.33]),
        ({"lr": 0.01}, [0.01, 0.03, 0.1], [0.0033]),
        ({"lr": 0.03}, [0.01, 0.03, 0.1], None),
        ({"lr": 600}, [150, 300, 600], [1200]),
        ({"lr": 50}, [30, 40, 50], [62]),
        ({"lr": 20}, [20, 60, 150], [7]),
        ({"lr": 2}, [2, 3, 4], [1]),
        ({"lr": 0}, [0, 1], None),
        ({"lr": 1}, [1, 3, 5], None),  # fewer than one step cannot be
        ({"lr": 5}, [5], None),
    ],
)
def test_edges(best: dict[str, float], grid: list[float], expected: list[float] | None) -> None:
    assert edges_of(best, {"lr": grid}).get("lr") == expected


def test_settings_are_chosen_by_rounds_that_are_reported() -> None:
    def rungs(rounds: int, search: dict[str, Any]) -> tuple[int, ...]:
        entry = {"label": "a", "method": "fedavg", "grid": {"lr": [0.1, 0.3]}}
        values: dict[str, Any] = {"name": "a", "rounds": rounds, "methods": [entry], "search": search}
        return Comparison(**values).rungs

    assert [rungs(rounds, {}) for rounds in (8, 20, 100)] == [(8,), (10, 20), (10, 30)]
    assert rungs(8, {"rounds": [5, 12]}) == (5, 12)
