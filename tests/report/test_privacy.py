"""What a report says of a run's privacy: what its settings state, what its last record spent, and nothing made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ntkfl.federation.config import RunConfig
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.simulation import execute
from ntkfl.report.runs import FoundRun
from ntkfl.report.view import view

PRIVATE = {"secure_sum": True, "epsilon": 2.0, "budget_rounds": 4, "noise_clients": 3}
COMMON: dict[str, Any] = {"rounds": 2, "clients_per_round": 4, "data": {"dataset": "digits", "clients": 6}}


def test_a_private_run_states_its_guarantee_and_what_is_spent(tmp_path: Path) -> None:
    config = RunConfig(**COMMON, model={"hidden": [8]}, method={"name": "private-sums"}, privacy=PRIVATE)
    execute(config, out=tmp_path / "private")
    said = view(FoundRun("run", "run", None, RunFolder(tmp_path / "private")))["privacy"]
    (one,) = said["guarantees"]
    spent = RunFolder(tmp_path / "private").records()[-1]["epsilon"]
    assert 1 < one["epsilon"] < 2  # of the two rounds
    assert (one["delta"], one["unit"], one["against"]) == ("1e-05", "record", "the aggregator, 2 rounds")
    assert any("at least 3 clients of each round are honest" in line for line in one["assumptions"])
    assert said["spent"] == pytest.approx(spent, rel=1e-5)
    assert (said["floor"], said["simulated"]) == (2, True)
    assert said["masks"] == "secure sums: only totals are seen unless server and shuffler collude"
    assert "of a single client nothing" in said["sees"]["aggregator"]
    assert set(said["sees"]) == {"aggregator", "shuffler", "key server", "others"}
