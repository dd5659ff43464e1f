"""The callbacks for MLflow and Weights & Biases in runs.md, run with stand-ins for the packages."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_both_log_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mlflow, wandb = MagicMock(), MagicMock()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "runs.md", "exec"), names)
    for logged in (mlflow.log_metrics, wandb.init.return_value.log):
        assert [call.kwargs["step"] for call in logged.call_args_list] == [1, 2, 3]
        assert all({"test_accuracy", "test_loss", "uplink_bytes"} <= call.args[0].keys() for call in logged.mock_calls)
    mlflow.end_run.assert_called_once()
    wandb.init.return_value.finish.assert_called_once()
