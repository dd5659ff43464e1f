"""What a log of a comparison gets to read while its runs go on."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from ntkfl.cli.compare import Watcher, tables
from ntkfl.compare.results import Reached, Row
from ntkfl.compare.spec import Comparison
from ntkfl.compare.trials import Cell
from ntkfl.federation.build import spelled_out
from ntkfl.federation.config import RunConfig


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_log_hears_of_rounds_now_and_then_and_of_every_run_that_ends(tmp_path: Path) -> None:
    clock, text = Clock(), io.StringIO()
    watcher = Watcher(Console(file=text, width=40), clock)
    cells = [
        Cell("FedAvg", RunConfig(rounds=rounds, seed=seed, method={"name": "fedavg"}), tmp_path)
        for seed, rounds in enumerate((20, 80))
    ]
    for cell in cells:
        cell.folder.create(spelled_out(cell.config))

    def play(cell: Cell, rounds: int) -> None:
        for number in range(len(cell.folder.records()) + 1, rounds + 1):
            cell.folder.append("history.jsonl", {"round": number, "test_accuracy": 0.5})
            cell.folder.append("timings.jsonl", {"round": number, "seconds": 0.5})

    with watcher:
        for second in range(61):  # a round of each in two seconds, and the first of them ends after forty
            clock.now = 100.0 + second
            play(cells[0], min(20, second // 2))
            play(cells[1], second // 2)
            watcher.watch(cells)
    assert text.getvalue().splitlines() == [
        "10 of 100 rounds  (0 of 2 runs finished, 1:39 min left)",
        "22 of 100 rounds  (0 of 2 runs finished, 1:18 min left)",
        "32 of 100 rounds  (0 of 2 runs finished, 1:10 min left)",
        "✓ FedAvg, seed 0: 50.00 % after 20 rounds, 10.0 s  (1 of 2 runs finished, 1:00 min left)",
        "45 of 100 rounds  (1 of 2 runs finished, 1:02 min left)",
    ]
    assert "\x1b" not in text.getvalue()
    assert "\r" not in text.getvalue()


def test_runs_of_an_earlier_stage_stay_in_the_count(tmp_path: Path) -> None:
    """A search's two lines stand above when the runs that follow begin: two are finished, not none."""
    text = io.StringIO()
    watcher = Watcher(Console(file=text, width=200), Clock())

    def cells(root: str, rounds: int) -> list[Cell]:
        made = [
            Cell("FedAvg", RunConfig(rounds=rounds, seed=seed, method={"name": "fedavg"}), tmp_path / root)
            for seed in (0, 1)
        ]
        for cell in made:
            if not cell.folder.path.exists():
                cell.folder.create(spelled_out(cell.config))
            for number in range(len(cell.folder.records()) + 1, rounds + 1):
                cell.folder.append("history.jsonl", {"round": number, "test_accuracy": 0.5})
                cell.folder.append("timings.jsonl", {"round": number, "seconds": 0.5})
        return made

    with watcher:
        watcher.watch(cells("search", 1))
        watcher.watch(cells("search", 2))  # the same runs, for longer
        watcher.watch(
            [*cells("cells", 2)[:1], Cell("new", RunConfig(seed=5, method={"name": "fedavg"}), tmp_path / "cells")]
        )
    counts = [line.partition("(")[2].split(" runs")[0] for line in text.getvalue().splitlines()]
    assert counts == ["1 of 2", "2 of 2", "3 of 4", "4 of 4", "5 of 6"]


def test_a_table_too_wide_for_the_terminal_loses_nothing(tmp_path: Path) -> None:
    """Eight rounds with their spread, in 80 columns."""
    shown = (1, 2, 3, 4, 5, 6, 7)
    entry = {"label": "a method with a long label", "method": {"name": "fedavg"}}
    comparison = Comparison(name="x", seeds=(0, 1), targets=(), show_rounds=shown, methods=(entry,))
    curves = [[0.8 + 0.01 * i + s for i in range(8)] for s in (0.0, 0.05)]
    row = Row(
        entry["label"], {"name": "fedavg"}, [0, 1], 8, curves, curves, [], [], [[1.0]] * 2, [], [], ["", ""], [], []
    )
    text = io.StringIO()
    console = Console(file=text, width=80)
    (_, table), *_ = tables(comparison, [row])
    console.print(table)
    words = text.getvalue().split()
    assert all(f"r{r}" in words for r in range(1, 9))
    assert all(f"{82.5 + i:.1f}" in words for i in range(8))
    assert words.count("3.5") == 8  # the spread of each


def test_a_table_that_fits_is_not_cut_at_the_right() -> None:
    """Two targets with bytes both ways, in 80 columns: headers are wrapped, cells are whole."""
    entries = [{"label": "NTK-FL from sums", "method": {"name": "fedavg"}}]
    comparison = Comparison(name="x", seeds=(0, 1), targets=(0.8, 0.9), methods=entries)
    reached = [Reached(0.8, [2, 2], [0.32] * 2, [0.32] * 2), Reached(0.9, [3, 3], [1.2] * 2, [0.5] * 2)]
    curves = [[0.5], [0.5]]
    row = Row(
        "NTK-FL from sums", {"name": "fedavg"}, [0, 1], 8, curves, curves, [], [], curves, reached, [], ["", ""], [], []
    )
    text = io.StringIO()
    console = Console(file=text, width=80)
    _, (_, table), _ = tables(comparison, [row])
    console.print(table)
    assert "0.32 + 0.32 = 0.64" in text.getvalue()
    assert "1.2 + 0.5 = 1.7" in text.getvalue()
    words = text.getvalue().split()
    assert words.count("down") == 2
    assert words.count("90%") == 2


def test_a_run_that_has_ended_is_not_read_again(tmp_path: Path) -> None:
    """Its line stands when its history is gone; a run of the same settings in another folder is another run."""
    text = io.StringIO()
    watcher = Watcher(Console(file=text, width=200), Clock())
    config = RunConfig(rounds=1, method={"name": "fedavg"})
    here, there = (Cell("FedAvg", config, tmp_path / name) for name in ("here", "there"))
    here.folder.create(spelled_out(config))
    for name, record in (("history.jsonl", {"round": 1, "test_accuracy": 0.5}), ("timings.jsonl", {"seconds": 0.5})):
        here.folder.append(name, record)
    with watcher:
        watcher.watch([here])
        (here.folder.path / "history.jsonl").unlink()
        watcher.watch([here])
        watcher.watch([here, there])
    assert len(text.getvalue().splitlines()) == 1
    assert list(watcher.ended) == [(here.folder.path, 1)]
