"""The callbacks for MLflow and Weights & Biases in runs.md: run with the packages, or with stand-ins for them."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
Logged = dict[int, dict[str, float]]


class MLflow(ModuleType):
    """The part of MLflow's fluent interface that the page uses, as strict on values as MLflow is."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.open, self.params, self.logged = False, dict[str, object](), Logged()

    def start_run(self) -> None:
        assert not self.open
        self.open = True

    def log_params(self, params: dict[str, object]) -> None:
        assert self.open
        self.params |= params

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert self.open
        assert isinstance(step, int)
        self.logged[step] = {name: float(value) for name, value in metrics.items()}

    def end_run(self) -> None:
        assert self.open
        self.open = False


class Wandb(ModuleType):
    """wandb.init, and the run that it gives."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.settings, self.logged, self.finished = dict[str, object](), Logged(), False

    def init(self, *, project: str | None = None) -> Wandb:
        self.settings = {"project": project}
        return self

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        assert not self.finished
        assert isinstance(step, int)
        assert step not in self.logged
        self.logged[step] = data

    def finish(self) -> None:
        self.finished = True


def test_both_log_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what the real packages write goes here, and nowhere else
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow, wandb = MLflow(), Wandb()
    missing = [stub for stub in (mlflow, wandb) if find_spec(stub.__name__) is None]
    for stub in missing:
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "runs.md", "exec"), names)
    for stub in missing:
        assert list(stub.logged) == [1, 2, 3]
        for numbers in stub.logged.values():
            assert {"test_accuracy", "test_loss", "uplink_bytes", "downlink_bytes", "seconds"} <= set(numbers)
    if mlflow in missing:
        assert mlflow.params == {"rounds": 3}
        assert not mlflow.open
    if wandb in missing:
        assert wandb.settings == {"project": "hospitals"}
        assert wandb.finished


def test_each_is_ten_lines() -> None:
    for block in BLOCKS:
        (body,) = re.findall(r"^class .*?(?=^\S|\Z)", block, re.DOTALL | re.MULTILINE)
        assert sum(bool(line.strip()) for line in body.splitlines()) <= 10
