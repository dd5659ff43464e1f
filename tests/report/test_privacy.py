"""What a report says of a run's privacy: what its settings state, what its last record spent, and nothing made up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ntkfl.federation.config import RunConfig
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.simulation import execute
from ntkfl.report.page import write_report
from ntkfl.report.runs import FoundRun
from ntkfl.report.view import view

PRIVATE = {"secure_sum": True, "epsilon": 2.0, "budget_rounds": 4, "noise_clients": 3}
COMMON: dict[str, Any] = {"rounds": 2, "clients_per_round": 4, "data": {"dataset": "digits", "clients": 6}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("private")
    runs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "private": ({"name": "private-sums"}, PRIVATE),
        "open": ({"name": "fedavg", "local_steps": 1}, {}),
        "rows": ({"name": "cp-ntk-fl", "steps": [50.0]}, {"projected_dim": 20}),
    }
    for name, (method, privacy) in runs.items():
        execute(RunConfig(**COMMON, model={"hidden": [8]}, method=method, privacy=privacy), out=root / name)
    return root


def stated(folder: Path) -> Any:
    return view(FoundRun("run", "run", None, RunFolder(folder)))["privacy"]


def test_a_private_run_states_its_guarantee_and_what_is_spent(runs: Path) -> None:
    said = stated(runs / "private")
    (one,) = said["guarantees"]
    spent = RunFolder(runs / "private").records()[-1]["epsilon"]
    assert re.fullmatch(r"ε = 1\.\d+ at δ = 1e-5 for a record, against the aggregator, 2 rounds", one["says"])
    assert any("at least 3 clients of each round are honest" in line for line in one["assumptions"])
    assert said["spent"] == f"ε = {spent:.3g} at δ = 1e-5 for a record after round 2"
    assert (said["secure_sum"], said["floor"], said["simulated"]) == (True, 2, True)
    assert said["sums"] == "secure sums: only totals are seen unless server and shuffler collude"
    assert "of a single client nothing" in said["sees"]["aggregator"]
    assert set(said["sees"]) == {"aggregator", "shuffler", "key server", "others"}


def test_the_page_holds_the_section(runs: Path, tmp_path: Path) -> None:
    text = write_report([runs], tmp_path / "report.html").read_text()
    assert '<section id="privacy" aria-labelledby="privacy-title" hidden>' in text
    assert "function promises(" in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1].replace("\\u003c", "<"))  # type: ignore[index]
    assert {run["name"]: bool(run["privacy"]["guarantees"]) for run in data["runs"]} == {
        "private": True, "open": False, "rows": False
    }  # fmt: skip
