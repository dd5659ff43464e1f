"""A real audit of a real run, on the page: replayed, attacked, reported, looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.report.conftest import Open

Shoot = Any
TRAIN = (
    "train --dataset digits --clients 8 --clients-per-round 3 --set hidden=[8] --rounds 2 --method cp-ntk-fl "
    "--set steps=[50,400] --set projected_dim=24 --set subsample_rate=0.2 --set sparsity=0.8 "
    "--out runs/private"
)
AUDIT = "audit runs/private --round 2 --out runs/private/audit"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After the commands that docs/audit.md gives, typed one after the other."""
    pytest.importorskip("torchmetrics", reason="needs the extra audit")
    root = tmp_path_factory.mktemp("audited")
    program = "import sys; from typer.testing import CliRunner; from ntkfl.cli import app\n"
    program += "for line in sys.argv[1:]: CliRunner().invoke(app, line.split(), catch_exceptions=False)"
    command = [sys.executable, "-c", program, TRAIN, AUDIT, "report runs --out report.html"]
    subprocess.run(command, cwd=root, check=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return root


@pytest.mark.parametrize(("name", "width", "scheme"), [("wide", 1400, "light"), ("phone", 360, "dark")])
def test_the_page_says_what_leaked(
    folder: Path, open_page: Open, shoot: Shoot, name: str, width: int, scheme: str
) -> None:
    found = json.loads((folder / "runs/private/audit/findings.json").read_text())
    assert found["round"] == 2
    page: Any = open_page((folder / "report.html").as_uri(), width=width, scheme=scheme)
    page.click("#audit > summary")
    said = page.inner_text("#audit")
    assert "Round 2, 3 clients" in said
    assert "aggregator and insider" in said
    for line in found["verdicts"].values():
        assert line in said
    page.click("#audit details > summary")
    assert page.locator("#audit tbody tr").count() == len(found["findings"])
    own = next(f for f in found["findings"] if f["attack"] == "labels of rows")
    row = page.inner_text("#audit tbody tr:has-text('labels of rows')")
    assert f"accuracy {own['mean']:g}" in row
    assert own["says"] in row
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shoot(page, f"audit-{name}-{scheme}")
