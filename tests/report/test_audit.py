"""A real audit of a real run, on the page: replayed, attacked, reported, looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import run
from tests.report.conftest import Open, Shoot

TRAIN = (
    "train --dataset digits --clients 8 --clients-per-round 3 --set hidden=[8] --rounds 2 --method cp-ntk-fl "
    "--set steps=[50,400] --set projected_dim=24 --set subsample_rate=0.2 --set sparsity=0.8 "
    "--out runs/private"
)
AUDIT = "audit runs/private --round 2 --out runs/private/audit"


def test_the_page_says_what_leaked(tmp_path: Path, open_page: Open, shoot: Shoot) -> None:
    """After the commands that docs/audit.md gives, typed one after the other."""
    pytest.importorskip("torchmetrics", reason="needs the extra audit")
    for line in (TRAIN, AUDIT, "report runs --out report.html"):
        done = run("-m", "ntkfl", *line.split(), directory=tmp_path)
        assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "runs/private/audit/findings.json").read_text())
    for width, scheme in ((1400, "light"), (360, "dark")):
        page: Any = open_page((tmp_path / "report.html").as_uri(), width=width, scheme=scheme)
        page.click("#audit > summary")
        said = page.inner_text("#audit")
        for text in ("Round 2, 3 clients", "aggregator and insider", *found["verdicts"].values()):
            assert text in said
        page.click("#audit details > summary")
        assert page.locator("#audit tbody tr").count() == len(found["findings"])
        own = next(f for f in found["findings"] if f["attack"] == "labels of rows")
        row = page.inner_text("#audit tbody tr:has-text('labels of rows')")
        assert f"accuracy {own['mean']:g}" in row
        assert own["says"] in row
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        shoot(page, f"audit-{width}-{scheme}")
