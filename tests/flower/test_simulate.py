"""Flower's own simulation, on Ray: the same weights as in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from safetensors.torch import load_file
from typer.testing import CliRunner

from ntkfl.cli import app
from ntkfl.errors import RunFolderError
from ntkfl.federation.build import load_data
from ntkfl.federation.config import RunConfig
from ntkfl.federation.simulation import execute
from ntkfl.flower.simulate import client_app, serve
from tests.flower.federations import NTK, distance
from tests.flower.local_grid import LocalGrid

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def config(method: dict[str, Any], **others: Any) -> RunConfig:
    values: dict[str, Any] = {
        "rounds": 3, "clients_per_round": 3, "seed": 7, "precision": "float64", "hold_out": 1,
        "data": {"dataset": "digits", "clients": 6, "alpha": 1.0}, "model": {"hidden": [12]}, "method": method,
    }  # fmt: skip
    return RunConfig(**(values | others))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))


def test_ntk_fl_from_the_command_line(tmp_path: Path) -> None:
    """With held-out clients, subsampling, and a shuffler that the simulation plays."""
    method = NTK | {"subsample_rate": 0.5, "sparsity": 0.8, "shuffle": True, "projected_dim": 20}
    settings, out = config(method), tmp_path / "run"
    toml = tmp_path / "run.toml"
    toml.write_text(tomli_w.dumps(settings.model_dump(mode="json", exclude_none=True)))
    result = CliRunner().invoke(
        app, ["flower", "simulate", str(toml), "--out", str(out), "--json"], catch_exceptions=False
    )
    history = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    here = execute(settings)
    assert distance(here.model, load_file(out / "model.safetensors")) < 1e-6
    assert [r["uplink_bytes"] for r in history] == [r["uplink_bytes"] for r in here.history]
    assert [r["validation_accuracy"] for r in history] == [r["validation_accuracy"] for r in here.history]
    with pytest.raises(RunFolderError, match="runtime"):  # a run is gone on with where it was begun
        execute(settings, out=out, resume=True)


def test_clients_keep_their_memory_and_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Scaffold, whose clients remember, in one go here and in two there; without Ray, which is no part of it."""
    method, out = {"name": "scaffold", "local_steps": 3}, tmp_path / "run"
    text = json.dumps(config(method).model_dump(mode="json", exclude_none=True))
    program = client_app(text, str(out / "clients"), "cpu", 1)
    grid = LocalGrid({11: program, 12: program, 13: program})
    data = load_data(config(method))
    serve(grid, config(method, rounds=2), data, out=out)
    again = serve(grid, config(method), data, out=out, resume=True)
    assert len(again.history) == 3
    assert distance(execute(config(method)).model, again.model.state_dict()) < 1e-9
