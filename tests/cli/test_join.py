"""`ntkfl join --data`: every form of a client's own data, checked against the run's inputs before anybody is asked."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from typer.testing import CliRunner

from ntkfl.cli import app
from ntkfl.data.client import read_own
from ntkfl.deployment.ledger import mark_ended
from ntkfl.errors import DataError, NTKFLError
from ntkfl.user_code import find_factory

pytest.importorskip("cryptography", reason="needs the extra services")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trial")
    settings = {"inputs": [4], "outputs": 2, "clients": 2, "clients_per_round": 2, "rounds": 1}
    (made / "run.toml").write_text(tomli_w.dumps(settings | {"method": {"name": "cp-ntk-fl", "projected_dim": 2}}))
    outcome = CliRunner().invoke(app, ["keys", "init", str(made / "t"), "--config", str(made / "run.toml")])
    assert outcome.exit_code == 0, outcome.output
    return made / "t/clients/client-0"


def join(folder: Path, data: str) -> BaseException | None:
    return CliRunner().invoke(app, ["join", str(folder), "--data", data, "--patience", "0.1"]).exception


def test_tables_archives_and_functions_are_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All get as far as the services, of which none runs."""
    x, y = np.ones((3, 4)), np.array([0, 1, 1])
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    (tmp_path / "mine.csv").write_text("a,b,c,d,label\n" + "1,2,3,4,0\n1,2,3,4,1\n")
    (tmp_path / "own_client_data.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "def mine():\n    return TensorDataset(torch.ones(3, 4), torch.tensor([0, 1, 1]))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for data in (str(tmp_path / "mine.npz"), str(tmp_path / "mine.csv"), "own_client_data:mine"):
        error = join(folder, data)
        assert isinstance(error, NTKFLError)
        assert "127.0.0.1" in str(error), error


def test_a_table_with_columns_of_its_own_names(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("a,b,c,d,outcome,ward\n" + "1,2,3,4,0,X\n1,2,3,4,1,X\n")
    command = ["join", str(folder), "--data", str(tmp_path / "mine.csv"), "--patience", "0.1"]
    assert "has no column 'label'" in str(CliRunner().invoke(app, command).exception)
    named = [*command, "--label-column", "outcome", "--client-column", "ward"]
    assert "127.0.0.1" in str(CliRunner().invoke(app, named).exception)  # read, and nobody there
    (tmp_path / "mine.csv").write_text("a,b,c,d,outcome,ward\n" + "1,2,3,4,ill,X\n1,2,3,4,well,X\n")
    assert "class_names" in str(CliRunner().invoke(app, named).exception)


def test_features_that_the_terms_name_go_by_name(folder: Path, tmp_path: Path) -> None:
    from ntkfl.deployment.contract import Federation

    terms = folder / "federation.toml"
    agreed = terms.read_text().replace("[terms]\n", '[terms]\nfeature_names = ["a", "b", "c", "d"]\n', 1)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "federation.toml").write_text(agreed)
    (tmp_path / "mine.csv").write_text("d,c,b,a,label\n" + "4,3,2,1,0\n4,3,2,1,1\n")
    assert "127.0.0.1" in str(join(other, str(tmp_path / "mine.csv")))  # read, and nobody there
    x, _ = read_own(str(tmp_path / "mine.csv"), Federation.read(other).terms.images, find_factory)
    assert x.tolist() == [[1.0, 2.0, 3.0, 4.0]] * 2
    (tmp_path / "mine.csv").write_text("a,b,c,e,label\n" + "1,2,3,4,0\n")
    assert "lacks d and has besides e" in str(join(other, str(tmp_path / "mine.csv")))


def test_data_of_another_shape_are_refused_at_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("a,b,label\n1,2,0\n")
    error = join(folder, str(tmp_path / "mine.csv"))
    assert isinstance(error, DataError)
    assert "[2]" in str(error)
    assert "expected an .npz, .csv or .parquet file" in str(join(folder, str(tmp_path / "none")))


def test_after_the_end_of_the_run_nobody_is_waited_for(folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.ones((3, 4)), y=np.array([0, 1, 1]))
    for run, ended in (("run-1", False), ("run-0", True)):
        mark_ended(folder, run)
        error = join(folder, str(tmp_path / "mine.npz"))
        (folder / f"ended-{run}").unlink()  # other tests have the same folder
        assert (error is None) == ended, error


def test_inputs_in_other_units_are_said_at_the_start(folder: Path, tmp_path: Path) -> None:
    for size, warned in ((3.0, False), (2000.0, True)):
        np.savez(tmp_path / "mine.npz", x=np.full((3, 4), size), y=np.array([0, 1, 1]))
        command = ["join", str(folder), "--data", str(tmp_path / "mine.npz"), "--patience", "0.1"]
        assert ("inputs are as large as 2e+03" in CliRunner().invoke(app, command).stderr) == warned
