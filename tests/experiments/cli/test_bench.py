"""`ntkfl bench` from the outside."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import typer
from ntkfl_experiments.bench import SUITES
from ntkfl_experiments.cli.bench import bench
from typer.testing import CliRunner

app = typer.Typer()
app.command()(bench)


def _run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.mark.long
def test_quick_run_writes_what_it_prints(tmp_path: Path) -> None:
    output = _run("--quick", "--json", tmp_path / "bench.json", "--plot", tmp_path / "bench.png")
    for piece in ("GFLOP/s", "GB/s", "torch", "threads", *(f"{name}: " for name in SUITES)):
        assert piece in output
    content = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert content.keys() == {"command", "quick", "machine", "versions", "rows"}
    assert content["quick"] is True
    assert {row["suite"] for row in content["rows"]} == set(SUITES)
    assert all(math.isfinite(row["seconds"]) for row in content["rows"])
    assert content["machine"]["gflops"] > 0
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
