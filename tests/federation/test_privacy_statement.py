"""What a run with secure sums says of itself before its first round, and keeps for its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from ntkfl.federation.callbacks import Functions
from ntkfl.federation.config import RunConfig
from ntkfl.federation.privacy_statement import sum_promise
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.simulation import execute
from ntkfl.methods import METHODS, Privacy
from ntkfl.methods.base import settle


@pytest.mark.parametrize(
    ("name", "privacy", "line"),
    [
        ("fedavg", {}, ""),
        ("fedavg", {"secure_sum": True}, "unless server and shuffler collude; no ε"),
        ("private-sums", {"secure_sum": True}, "unless server and shuffler collude"),
        ("private-sums", {"secure_sum": True, "epsilon": None}, "unless server and shuffler collude; no ε"),
    ],
)
def test_the_line_says_what_masks_promise_and_that_they_are_no_noise(
    name: str, privacy: dict[str, object], line: str
) -> None:
    said = sum_promise(settle(METHODS[name](), Privacy(**privacy))[0])
    assert said == (f"secure sums: only totals are seen {line}" if line else "")
    assert len(said) <= 88


def test_a_run_says_it_first_and_keeps_it(tmp_path: Path) -> None:
    method, privacy = {"name": "fedavg", "local_steps": 1}, {"secure_sum": True}
    data = {"dataset": "digits", "clients": 3, "alpha": 1.0}
    config = RunConfig(rounds=1, clients_per_round=3, data=data, model={"hidden": [4]}, method=method, privacy=privacy)
    notes: list[str] = []
    execute(config, out=tmp_path / "run", callbacks=[Functions(on_start=notes.append)])
    kept = RunFolder(tmp_path / "run").config()["promises"]
    assert kept["sums"] in notes
