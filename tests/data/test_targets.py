"""Whole-number targets: classes or real numbers, as the loss has it or as their user says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ntkfl
from ntkfl.errors import ConfigError, DataError, ModelError
from ntkfl.federation.config import RunConfig, load_data
from ntkfl.federation.simulation import execute
from ntkfl.methods import FedAvg

ROWS = [(i / 10, 50 - 2 * i, "north" if i % 2 else "south") for i in range(40)]  # targets 50, 48, … −28


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "counts.csv"
    path.write_text("x,label,client\n" + "".join(f"{x},{y},{client}\n" for x, y, client in ROWS))
    return path


def loaded(path: Path, loss: str, **data: str) -> ntkfl.data.Federated:
    method = {"name": "fedavg", "loss": loss}
    return load_data(RunConfig(method=method, data={"dataset": str(path), **data}))


@pytest.mark.parametrize("suffix", ["csv", "npz"])
def test_whole_numbers_of_a_file_are_real_with_squared_error(suffix: str, table: Path, tmp_path: Path) -> None:
    if suffix == "npz":
        x, y, client = (np.array(column) for column in zip(*ROWS, strict=True))
        table = tmp_path / "counts.npz"
        np.savez(table, x=x[:, None], y=y, client=(client == "north").astype(np.int64))
    config = RunConfig(
        rounds=30,
        method={"name": "fedavg", "loss": "mse", "lr": 0.05, "local_steps": 10},
        data={"dataset": str(table), "standardize": True},
        model={"hidden": ()},
    )
    fed = load_data(config)
    assert fed.classes is None
    assert fed.output_dim == 1
    assert sorted(torch.cat([fed.rows.y, fed.test_rows.y])[:, 0].tolist()) == sorted(float(y) for _, y, _ in ROWS)
    run = execute(config)
    assert run.history[-1]["test_accuracy"] is None
    assert run.history[-1]["test_loss"] < 1.0  # a line fits; the targets' variance is 533


def test_losses_of_classes_and_words_keep_classes(tmp_path: Path) -> None:
    path = tmp_path / "marks.csv"
    path.write_text("x,label,client\n" + "".join(f"{i / 9},{i % 3},a\n" for i in range(40)))
    assert loaded(path, "ce").classes == 3
    assert loaded(path, "mse").classes is None
    assert loaded(path, "mse", targets="classes").classes == 3
    assert loaded(path, "ce", targets="real").classes is None
    path.write_text("x,label,client\n" + "".join(f"{i / 9},{'yes' if i % 3 else 'no'},a\n" for i in range(40)))
    assert loaded(path, "mse").classes == 2
    with pytest.raises(DataError, match="labels are text, such as 'no': classes, not real targets"):
        loaded(path, "mse", targets="real")


def test_a_loss_of_ones_own_does_not_tell(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "targets_loss.py").write_text("def huber(f, Y):\n    return (f - Y).abs().sum(-1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"whole numbers: say whether they are real or classes \(--targets real\)"):
        loaded(table, "targets_loss:huber")
    assert loaded(table, "targets_loss:huber", targets="real").classes is None


def test_in_python_they_are_told(table: Path) -> None:
    fed = ntkfl.data.from_file(table, targets="real").partition(ntkfl.data.ByClient())
    assert fed.classes is None
    assert fed.rows.y.dtype == torch.float32
    x, y = torch.randn(12, 3), torch.arange(12)
    assert ntkfl.data.from_clients([(x, y)], test=(x, y)).classes == 12
    told = ntkfl.data.from_clients([(x, y)], test=(x, y), targets="real")
    assert (told.classes, told.output_dim) == (None, 1)
    how = ntkfl.data.IID(clients=3)
    assert ntkfl.data.from_datasets((x, y), test=(x, y), partition=how, targets="real").classes is None
    assert ntkfl.data.from_clients([(x, y.float())], test=(x, y.float()), targets="classes").classes == 12
    with pytest.raises(DataError, match="numbers that are not whole"):
        ntkfl.data.from_clients([(x, y + 0.5)], test=(x, y), targets="classes")
    with pytest.raises(ConfigError, match="kind of targets 'reel'"):
        ntkfl.data.from_clients([(x, y)], test=(x, y), targets="reel")


def test_a_network_of_one_output_on_classes_is_told_of_real_targets() -> None:
    x, y = torch.randn(12, 3), torch.arange(12)
    fed = ntkfl.data.from_clients([(x, y)], test=(x, y))
    with pytest.raises(ModelError, match="for regression make them with targets='real'"):
        ntkfl.train(torch.nn.Linear(3, 1), fed, FedAvg(loss="mse"), rounds=1)
    notes: list[str] = []

    class Notes:
        def on_start(self, note: str) -> None:
            notes.append(note)

    ntkfl.train(torch.nn.Linear(3, 12), fed, FedAvg(loss="mse"), rounds=1, callbacks=[Notes()])
    assert any("whole-number targets are classes here" in note for note in notes)
