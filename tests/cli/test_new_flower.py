"""`ntkfl new --flower` writes a Flower app that simulates as it is, and that Flower Hub would take."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ntkfl.cli import app
from tests.cli.flower_app import environment, simulate

pytest.importorskip("flwr", reason="needs the extra flower")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["new", "two-sites", "--flower"])
    assert done.exit_code == 0, done.output
    assert "flwr run . --stream" in done.output
    return tmp_path / "two-sites"


def test_it_learns_in_simulation(project: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Flower's simulation")
    model = tmp_path / "model.pt"
    said = simulate(project, tmp_path / "home", f"num-rounds=2 final-model='{model}'")
    accuracies = [float(a) for a in re.findall(r"\d: \{'accuracy': '([\d.e+-]+)'\}", said.split("ServerApp-side")[-1])]
    assert len(accuracies) == 3  # before, and after each round
    assert accuracies[-1] > 0.7, said
    assert torch.load(model, weights_only=True)["head.weight"].shape == (10, 128)


def test_it_is_small_and_builds_as_flower_hub_asks(project: Path, tmp_path: Path) -> None:
    files = [path for path in project.rglob("*") if path.is_file()]
    assert sum(len(path.read_text().splitlines()) for path in files) < 150
    assert "fab-format-version = 1" in (project / "pyproject.toml").read_text()  # checked strictly by `flwr build`
    env = environment(tmp_path / "home")
    done = subprocess.run(["flwr", "build"], cwd=project, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "missing" not in done.stdout, done.stdout
    assert len(list(project.glob("*.fab"))) == 1
