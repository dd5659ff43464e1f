"""The Python of compare.md: the callback for MLflow with a stand-in for the package, and a report."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_it_logs_every_round_and_writes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mlflow = MagicMock()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "compare.md", "exec"), names)
    logged = mlflow.log_metrics.call_args_list
    assert [call.kwargs["step"] for call in logged] == [1, 2, 3]
    assert all({"test_accuracy", "test_loss", "uplink_bytes"} <= call.args[0].keys() for call in logged)
    mlflow.end_run.assert_called_once()
    assert (tmp_path / "report.html").exists()
