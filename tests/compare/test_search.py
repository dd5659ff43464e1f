"""Settings are chosen on held-out clients, by rounds that are reported, and what lies at an edge is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ntkfl.compare.results import score_lines, search_lines
from ntkfl.compare.search import search
from ntkfl.compare.spec import Comparison
from ntkfl.compare.trials import Cell
from ntkfl.federation.run_folder import RunFolder
from tests.compare.comparisons import TOML, FakeRuns, read


def test_a_search_follows_held_out_clients_and_says_what_lies_at_an_edge(tmp_path: Path) -> None:
    comparison = read(tmp_path, TOML.replace("lr = [0.1, 0.3]", "lr = [0.1, 0.3, 0.9]"))
    runs = FakeRuns(lambda m: 0.9 - abs(m["lr"] - 0.3) / 10 - abs(m["local_steps"] - 4) / 100)
    chosen = search(comparison, tmp_path / "s", runs)  # type: ignore[arg-type]
    assert chosen["FedAvg"].best == (("lr", 0.3), ("local_steps", 4))
    assert chosen["FedAvg"].at_edge == ["local_steps"]
    assert chosen["NTK-FL"].best == ()
    (line,) = search_lines(comparison, chosen)
    assert line.startswith("FedAvg: searched lr in {0.1, 0.3, 0.9}; local_steps in {2, 4} on 6 held-out clients; chose")
    assert line.endswith("at the edge of what was tried in local_steps: a wider grid may have better")


def test_every_point_of_a_grid_has_its_score(tmp_path: Path) -> None:
    """Of its longest run; one that diverged says so."""
    comparison = read(tmp_path)

    def run(cells: list[Cell]) -> None:
        FakeRuns(lambda m: m["local_steps"] / 8 + (m["lr"] == 0.3) / 4)(cells)
        for cell in cells:
            if cell.config.method["lr"] == 0.3 and cell.config.method["local_steps"] == 2:
                (cell.folder.path / "failed.txt").write_text("diverged")

    chosen = search(comparison, tmp_path / "s", run)  # type: ignore[arg-type]
    points = {tuple(p["setting"].values()): (p["rounds"], p["score"]) for p in chosen["FedAvg"].dump()["scores"]}
    assert points == {(0.3, 4): (2, 0.75), (0.1, 4): (1, 0.5), (0.1, 2): (1, 0.25), (0.3, 2): (1, None)}
    (line,) = score_lines(chosen)
    assert line.startswith(
        "FedAvg, accuracy on held-out clients over the last third of rounds: lr 0.3, local_steps 4: 75.0 % (2 rounds); "
    )
    assert line.endswith("lr 0.3, local_steps 2: failed (1 round)")


def test_a_search_is_among_honest_clients(tmp_path: Path) -> None:
    entry = {"label": "m", "method": "fedavg", "grid": {"lr": [0.1, 0.3]}, "byzantine": {"kind": "sign-flip"}}
    data = {"dataset": "digits", "clients": 8, "alpha": 1.0}
    comparison = Comparison(name="a", methods=[entry], data=data, search={"hold_out": 3, "rounds": [1]})
    seen: list[object] = []

    def run(cells: list[Cell]) -> None:
        seen.extend(cell.config.byzantine for cell in cells)
        FakeRuns(lambda m: m["lr"])(cells)

    search(comparison, tmp_path / "s", run)  # type: ignore[arg-type]
    assert seen == [None, None]
    assert comparison.run(comparison.methods[0], 0, {"lr": 0.1}).byzantine is not None


def test_halving_continues_only_the_best_and_the_last_rung_decides(tmp_path: Path) -> None:
    """lr 0.3 is ahead in two rounds and behind in four: where three of four settings go on so far, 0.1 is chosen."""
    early = read(tmp_path)
    late = read(tmp_path, TOML.replace("rounds = [1, 2]", "rounds = [2, 4]\nkeep = 0.75"))

    def run(cells: list[Cell]) -> None:
        for cell in cells:
            sign = 1 if cell.config.rounds <= 2 else -1
            FakeRuns(lambda m, sign=sign: 0.5 + sign * m["lr"] - m["local_steps"] / 100)([cell])

    chosen = [search(c, tmp_path / str(i), run)["FedAvg"] for i, c in enumerate((early, late))]  # type: ignore[arg-type]
    assert [dict(c.best) for c in chosen] == [{"lr": 0.3, "local_steps": 2}, {"lr": 0.1, "local_steps": 2}]
    lengths = [sorted(len(RunFolder(p).records()) for p in (tmp_path / str(i)).iterdir()) for i in range(2)]
    assert lengths == [[1, 1, 1, 2], [2, 4, 4, 4]]  # from where they were


def test_settings_are_chosen_by_rounds_that_are_reported() -> None:
    def searched(rounds: int, search: dict[str, Any]) -> Comparison:
        entry = {"label": "a", "method": "fedavg", "grid": {"lr": [0.1, 0.3]}}
        values: dict[str, Any] = {"data": {"dataset": "digits", "clients": 30}, "methods": [entry], "search": search}
        return Comparison(name="a", rounds=rounds, **values)

    assert [searched(rounds, {}).rungs for rounds in (8, 20, 100)] == [(8,), (10, 20), (10, 30)]
    assert searched(8, {"rounds": [5, 12]}).rungs == (5, 12)
    assert searched(8, {}).prepared()[0].search.hold_out == 5  # a tenth of 30 clients would lack classes
