"""Handing a model on: it predicts as the run did, and its projection opens to those named alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ntkfl
from ntkfl.cli import app
from ntkfl.crypto.context import Secret
from ntkfl.crypto.hpke import SealingKey
from ntkfl.errors import ConfigError, ModelError, RunFolderError, TrustError
from ntkfl.federation.export import Export, export, load_exported
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.simulation import Simulation
from ntkfl.privacy.projection import RunSecret, make_projection

TRAIN = ["train", "--dataset", "digits", "--clients", "20", "--clients-per-round", "4", "--rounds", "2"]


def ntkfl_command(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "run"
    ntkfl_command(*TRAIN, "--method", "cp-ntk-fl", "--set", "projected_dim=30", "--out", out)
    return out


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "reader.pem"
    SealingKey.generate().save(path)
    return path


def accuracy(model: torch.nn.Module) -> float:
    fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=20, alpha=0.1), seed=0)
    x, y = fed.test
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def test_sealed_to_a_reader(run: Path, reader: Path, tmp_path: Path) -> None:
    public = SealingKey.load(reader).public
    other = SealingKey.generate()
    other.save(tmp_path / "other.pem")
    result = ntkfl_command("export", run, "--out", tmp_path / "m", "--to", f"reader={public.hex()}")
    assert "sealed to reader" in result.output
    assert accuracy(load_exported(tmp_path / "m", reader)) == RunFolder(run).records()[-1]["test_accuracy"]
    with pytest.raises(TrustError, match="opens none of the seals"):
        load_exported(tmp_path / "m", tmp_path / "other.pem")
    with pytest.raises(TrustError, match="sealed to reader"):
        load_exported(tmp_path / "m")
    assert not (tmp_path / "m" / "projection.safetensors").exists()
    seed = RunSecret.simulated(0).seed.reveal()
    for path in (tmp_path / "m").iterdir():
        assert seed not in path.read_bytes()
        assert seed.hex().encode() not in path.read_bytes()


def test_a_seal_is_for_this_model(run: Path, reader: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "m", {"reader": SealingKey.load(reader).public})
    weights = tmp_path / "m" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(TrustError):
        load_exported(tmp_path / "m", reader)


def test_without_a_projection_there_is_nothing_to_seal(tmp_path: Path) -> None:
    ntkfl_command(*TRAIN, "--out", tmp_path / "run")
    result = ntkfl_command("export", tmp_path / "run", "--out", tmp_path / "m")
    assert "no projection" in result.output
    assert Export.read(tmp_path / "m").projection is None
    assert accuracy(load_exported(tmp_path / "m")) > 0.3


def test_a_run_from_python_with_a_secret_of_its_own(tmp_path: Path, reader: Path) -> None:
    fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=20, alpha=0.1), seed=0)
    secret = RunSecret(Secret(bytes(32)), "mine", "first")
    method = ntkfl.methods.CPNTKFL(projected_dim=30, shuffle=False)
    model = torch.nn.Sequential(torch.nn.Linear(30, 8), torch.nn.Tanh(), torch.nn.Linear(8, 10))
    done = Simulation(model, fed, method, clients_per_round=3, secret=secret).run(1, out=tmp_path / "run")
    public = {"reader": SealingKey.load(reader).public}
    with pytest.raises(TrustError, match="not the one the run was trained with"):
        export(tmp_path / "run", tmp_path / "no", public)
    export(tmp_path / "run", tmp_path / "m", public, secret=secret)
    with pytest.raises(ModelError, match="give a network like it"):
        load_exported(tmp_path / "m", reader)
    loaded = load_exported(
        tmp_path / "m",
        reader,
        model=torch.nn.Sequential(torch.nn.Linear(30, 8), torch.nn.Tanh(), torch.nn.Linear(8, 10)),
    )
    x = fed.test[0][:5]
    expected = done.model(make_projection(secret, (1, 8, 8), 30, method.projection)(x))
    assert torch.allclose(loaded(x), expected, atol=1e-5)
    with pytest.raises(ModelError, match="do not fit"):
        load_exported(tmp_path / "m", reader, model=torch.nn.Linear(3, 3))


def test_what_cannot_be_exported(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no run"):
        export(tmp_path / "nothing", tmp_path / "m", {})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        export(run, tmp_path / "full", {})
    with pytest.raises(ConfigError, match="NAME=KEY"):
        ntkfl_command("export", run, "--out", tmp_path / "m", "--to", "reader")
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        ntkfl_command("export", run, "--out", tmp_path / "m", "--to", "reader=12")
