"""Findings and measures: hand-computed cases; and a study of hidden rows, by hand and by command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ntkfl
from ntkfl.audit.capture import capture
from ntkfl.audit.finding import ROLES, Finding, best_ssim, guesses, relative_error, ssim
from ntkfl.audit.study import study
from ntkfl.cli import app
from ntkfl.federation.simulation import execute
from tests.audit.fixtures import config


def test_success_is_what_is_gained_over_guessing() -> None:
    def finding(mean: float, guess: float = 0.5, measure: str = "SSIM") -> Finding:
        return Finding("a", "aggregator", "x", measure, [mean - 0.1, mean + 0.1], guess)

    assert finding(0.7).success == pytest.approx(0.4)
    assert finding(0.3).success == 0  # worse than guessing is no gain
    assert finding(0.05, 1.0, "relative error").success == pytest.approx(0.95)  # errors: less is more
    assert finding(0.7).spread == pytest.approx(0.1 * 2**0.5)


def test_measures_on_cases_one_can_check() -> None:
    x = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(ssim(x, x), torch.ones(3))
    assert float(ssim(x, 1 - x).max()) < 0
    torch.testing.assert_close(relative_error(x, 1.5 * x), torch.full((3,), 0.5))
    assert torch.allclose(best_ssim(x, x.flip(0)), torch.ones(3))
    public = (torch.tensor([[0.0], [2.0], [5.0]]), torch.tensor([0, 0, 1]))
    assert guesses(public, torch.tensor([1, 0, 7])).flatten().tolist() == pytest.approx([5.0, 1.0, 7 / 3])
    assert bool(torch.isfinite(ssim(x[..., :8, :8], x[..., :8, :8])).all())


def test_a_study_of_hidden_rows() -> None:
    hidden = {"subsample_rate": 0.1, "projected_dim": 24, "sparsity": 0.8}
    result = study(capture(config({"name": "cp-ntk-fl"}, privacy=hidden)))
    by = {(f.attack, f.role, f.measure): f for f in result.findings}
    own = by["analytic inversion", "aggregator", "relative error"]
    assert own.recovers == "projected inputs z"
    assert own.success > 0.5
    helped = by["analytic inversion, with P", "aggregator+insider", "SSIM"]
    assert 0 < helped.success < 0.9
    assert by["labels of rows", "aggregator", "accuracy"].mean == 1
    said = result.dump()["verdicts"]
    assert set(said) == set(ROLES)
    assert "who sent every row" in said["aggregator+shuffler"]
    assert json.loads(json.dumps(result.dump()))["findings"]


def test_the_command_line_writes_a_folder_and_says_what_is_wrong(tmp_path: Path) -> None:
    toml = tmp_path / "plan.toml"
    toml.write_text(
        'clients_per_round = 3\nrounds = 1\n[data]\ndataset = "digits"\nclients = 6\npartition = "iid"\n'
        '[model]\nhidden = [16]\n[method]\nname = "fedavg"\nlocal_steps = 1\n'
    )
    runner = CliRunner()
    made = runner.invoke(app, ["audit", "--config", str(toml), "--out", str(tmp_path / "out")])
    assert made.exit_code == 0, made.output
    assert all(len(line) <= 80 for line in made.output.splitlines() if "written to" not in line and "/" not in line)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"findings.json"}
    for arguments, words in (
        (["audit"], "give one of these: the folder of a run"),
        (["audit", "--config", str(toml), "--round", "5"], "no round 5"),
    ):
        assert words in str(runner.invoke(app, arguments).exception)


@pytest.mark.parametrize("secure", [False, True])
def test_a_finished_run_is_its_settings_and_its_final_model(tmp_path: Path, secure: bool) -> None:
    run, toml, final = tmp_path / "run", tmp_path / "run" / "config.toml", "membership by loss, the final model"
    execute(config({"name": "fedavg", "local_steps": 1}, privacy={"secure_sum": secure}), out=run)

    def attacked(*words: str) -> dict[str, Any]:
        said = CliRunner().invoke(app, ["audit", *words, "--round", "2", "--json"]).stdout
        return {finding["attack"]: finding for finding in json.loads(said)["findings"]}

    found = attacked(str(run))
    assert found.pop(final)["role"] == "outsider"
    assert found == attacked("--config", str(toml))
    said = CliRunner().invoke(app, ["audit", str(run)]).stdout
    assert f"the settings in {toml}, played anew, and the final model of {run}" in said


def test_a_run_that_cannot_be_audited_says_why(tmp_path: Path) -> None:
    fed = ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=3), seed=0)
    ntkfl.train(ntkfl.models.mlp(64, 4, 10), fed, ntkfl.methods.SumNTKFL(), rounds=1, out=tmp_path / "python")
    execute(config({"name": "fedavg", "local_steps": 1}), out=tmp_path / "begun")
    shutil.rmtree(tmp_path / "begun" / "checkpoint")
    for name, why in (("python", "made from Python"), ("begun", "no finished round"), ("nothing", "holds no run")):
        assert why in str(CliRunner().invoke(app, ["audit", str(tmp_path / name)]).exception)
