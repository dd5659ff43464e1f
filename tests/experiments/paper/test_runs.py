"""Items run for real, on the built-in digits: every curve is there, settings are the grid's, nothing runs twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from ntkfl_experiments.paper import heterogeneity
from ntkfl_experiments.paper.curves import judge_five
from ntkfl_experiments.paper.item import Context
from ntkfl_experiments.paper.learning import five_methods
from ntkfl_experiments.paper.settings import CENTRAL, FEDAVG, LABELLED, NOVA, OURS, PAPER, SHARE

from ntkfl.federation.config import DataConfig

DIGITS = DataConfig(dataset="digits", clients=24, alpha=0.5)


def stamps(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("history.jsonl")}


@pytest.mark.long
def test_five_methods_on_one_federation(tmp_path: Path) -> None:
    context = Context("quick", tmp_path / "fig4", workers=2)
    outcome = five_methods(context, "digits", "digits", DIGITS, [])
    curves = {curve["label"]: curve for curve in outcome.data["curves"]}
    assert list(curves) == [CENTRAL, PAPER, OURS, SHARE, NOVA, FEDAVG]
    assert all([len(seed) for seed in curve["accuracy"]] == [12] for curve in curves.values())
    assert curves[FEDAVG]["setting"]["local_steps"] in (10, 50)
    assert curves[FEDAVG]["searched"] == {"lr": [0.03, 0.1], "local_steps": [10, 50]}
    assert curves[PAPER]["setting"]["steps"] == LABELLED[PAPER]["steps"]
    assert len(judge_five(outcome.data)[0]) == 5
    before = stamps(tmp_path)
    again = five_methods(context, "digits", "digits", DIGITS, [])
    assert (again.data, stamps(tmp_path)) == (outcome.data, before)


def test_a_drop_at_small_alpha_is_judged_by_the_means() -> None:
    flat, steep = [0.85, 0.85], [0.80, 0.80]
    ends = {label: {"0.1": flat, "0.5": flat} for label in (PAPER, OURS, SHARE)} | {
        label: {"0.1": steep, "0.5": flat} for label in (NOVA, FEDAVG)
    }
    assert [f.holds for f in heterogeneity.judge({"accuracy": ends})[0]] == [True, True, True, True]
    ends[FEDAVG] = {"0.1": flat, "0.5": steep}
    ends[OURS] = {"0.1": [0.8, 0.9], "0.5": flat}
    assert [f.holds for f in heterogeneity.judge({"accuracy": ends})[0]] == [True, False, False, False]
