"""A small comparison, and runs that cost nothing, for the tests of comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ntkfl.compare.spec import Comparison
from ntkfl.compare.trials import Cell

TOML = """
rounds = 4
clients_per_round = 4
seeds = [0, 1]
targets = [0.3, 0.999]
show_rounds = [1, 4]
[data]
dataset = "digits"
clients = 30
[model]
hidden = [12]
[search]
hold_out = 6
rounds = [1, 2]
[[methods]]
label = "NTK-FL"
rounds = 2
method = { name = "ntk-fl", steps = [50, 400] }
[[methods]]
label = "FedAvg"
method = { name = "fedavg", average = 0.5 }
grid = { lr = [0.1, 0.3], local_steps = [2, 4] }
"""


def read(tmp_path: Path, text: str = TOML) -> Comparison:
    path = tmp_path / "small.toml"
    path.write_text(text)
    return Comparison.read(path)


class FakeRuns:
    """Stands in for running cells in tests of the search alone: writes histories from a formula."""

    def __init__(self, accuracy: Any) -> None:
        self.accuracy = accuracy
        self.rounds_run: dict[str, int] = {}

    def __call__(self, cells: list[Cell]) -> None:
        for cell in cells:
            cell.folder.path.mkdir(parents=True, exist_ok=True)
            have = len(cell.folder.records())
            for r in range(have + 1, cell.config.rounds + 1):
                # The test set would choose the worst setting: the search must not look at it.
                value = self.accuracy(cell.config.method)
                record = {"round": r, "validation_accuracy": value, "test_accuracy": 1 - value}
                cell.folder.append("history.jsonl", record)
            self.rounds_run[cell.key] = cell.config.rounds
