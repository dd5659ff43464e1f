"""`ntkfl join --data`: every form of a client's own data, checked against the run's inputs before anybody is asked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tomli_w
from typer.testing import CliRunner

from ntkfl.cli import app
from ntkfl.errors import NTKFLError

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
