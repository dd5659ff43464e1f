"""Folders from elsewhere name code: no command, and no function that reads one, runs it unless its user says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner, Result

from ntkfl.cli import app
from ntkfl.errors import TrustError
from ntkfl.federation.config import RunConfig
from ntkfl.federation.simulation import execute
from ntkfl.safe_parse import read_toml

PLANTED = """
from pathlib import Path
import ntkfl
Path(__file__).with_name("taken-over").touch()
def factory(shape, outputs):
    return ntkfl.models.mlp(64, 4, outputs)
def loss(f, Y):
    return (f - Y).square().sum(-1)
def clients():
    return ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=4), seed=0)
class Own(ntkfl.methods.FedAvg):
    pass
class Mixed(ntkfl.methods.CPNTKFL):
    pass
"""
NAMES = ("factory", "clients", "Own", "Mixed", "loss")
MODEL, DATA, METHOD, MIXED, LOSS = (f"planted_by_a_stranger:{name}" for name in NAMES)
TRAINED = {"rounds": 1, "clients_per_round": 2, "method": {"name": "fedavg", "local_steps": 1}}
DIGITS = {"dataset": "digits", "partition": "iid", "clients": 4}
REFUSED = "names code that would be imported and run here: planted_by_a_stranger:.*--allow-code.*allow_code=True"


@pytest.fixture
def taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that the planted code writes when it is imported, from where a user of the folder stands."""
    (tmp_path / "planted_by_a_stranger.py").write_text(PLANTED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "taken-over"
    sys.modules.pop("planted_by_a_stranger", None)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refuses(taken_over: Path, *arguments: str | Path) -> None:
    error = run(*arguments).exception
    assert isinstance(error, TrustError), error
    assert error.args[0].count("\n") == 0
    with pytest.raises(TrustError, match=REFUSED):
        raise error
    assert not taken_over.exists()


def a_run(folder: Path, **changes: object) -> Path:
    """A finished run whose settings were changed to name the planted code."""
    execute(RunConfig(data=DIGITS, model={"hidden": [4]}, **TRAINED), out=folder)
    values = read_toml(folder / "config.toml")
    (folder / "config.toml").write_bytes(tomli_w.dumps(values | changes).encode())
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"name": MODEL}},
        {"data": {"dataset": DATA}},
        {"method": {"name": METHOD, "local_steps": 1}},
        {"method": {"name": "fedavg", "loss": LOSS}},
    ],
)
def test_a_runs_folder(changes: dict[str, object], tmp_path: Path, taken_over: Path) -> None:
    folder = a_run(tmp_path / "run", **changes)
    refuses(taken_over, "audit", folder)
    refuses(taken_over, "train", "--resume", "--out", folder, "--rounds", "2")
    run("report", folder, "--out", tmp_path / "page.html")
    assert not taken_over.exists()
    run("audit", folder, "--allow-code")  # it may not be the code that the run was made with
    assert taken_over.exists()  # the attack is real


def test_what_its_user_names_is_run(tmp_path: Path, taken_over: Path) -> None:
    """Typed on the command line, or written into the user's own --config."""
    small = ["--rounds", "1", "--clients-per-round", "2", "--method", METHOD, "--set", "local_steps=1"]
    assert run("train", "--dataset", DATA, "--model", MODEL, *small).exit_code == 0
    assert taken_over.exists()
    taken_over.unlink()
    sys.modules.pop("planted_by_a_stranger")
    (tmp_path / "own.toml").write_text(tomli_w.dumps(TRAINED | {"data": DIGITS, "model": {"name": MODEL}}))
    assert run("train", "--config", tmp_path / "own.toml", "--out", tmp_path / "kept").exit_code == 0
    assert taken_over.exists()
    refuses_again = run("train", "--resume", "--out", tmp_path / "kept", "--rounds", "2")
    assert isinstance(refuses_again.exception, TrustError)
    assert run("train", "--resume", "--out", tmp_path / "kept", "--rounds", "2", "--allow-code").exit_code == 0
