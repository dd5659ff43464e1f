"""Runs trained on a table: folder and export keep what later inputs need, so that a file's rows score as they did."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ntkfl
from ntkfl.data.files import from_file
from ntkfl.errors import DataError
from ntkfl.federation.config import RunConfig
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.simulation import execute

FEATURES = ("age", "crp mg/l", "Hb")
SIZES = np.array([10.0, 500.0, 0.01])


def write_table(path: Path, features: tuple[str, ...] = FEATURES, rows: int = 400) -> Path:
    """Columns of sizes far apart and far from 0; the label follows from `age` alone."""
    draw = np.random.default_rng(0)
    z = draw.standard_normal((rows, len(FEATURES)))
    columns = dict(zip(FEATURES, (5 * SIZES + SIZES * z).T, strict=True))
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*features, "outcome", "site"])
        for i in range(rows):
            table.writerow([*(columns[name][i] for name in features), "ill" if z[i, 0] > 0 else "well", f"s{i % 4}"])
    return path


def settings(table: Path, standardize: bool = True) -> RunConfig:
    own = {"dataset": str(table), "label_column": "outcome", "client_column": "site", "standardize": standardize}
    return RunConfig(rounds=1, data=own, model={"name": "mlp", "hidden": [30]}, method={"name": "sum-ridge"})


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("table") / "raw.csv")


@pytest.fixture(scope="module")
def run(table: Path) -> Path:
    execute(settings(table), out=table.parent / "run")
    return table.parent / "run"


def raw_test_rows(table: Path) -> tuple[torch.Tensor, torch.Tensor]:
    return from_file(table, label="outcome", client="site").test_rows.take()


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def test_standardisation_goes_with_the_folder(run: Path, table: Path) -> None:
    (x, y), reached = raw_test_rows(table), RunFolder(run).records()[-1]["test_accuracy"]
    loaded = ntkfl.Run.load(run)
    assert reached > 0.9
    assert loaded.evaluate(x, y).accuracy == reached
    assert accuracy(loaded.model, x, y) < 0.8  # the network alone does not know the inputs' sizes
    assert float((loaded.predict(x).argmax(1) == y).double().mean()) == reached
    assert loaded.standardization is not None
    training = from_file(table, label="outcome", client="site").rows.x.double()
    torch.testing.assert_close(torch.tensor(loaded.standardization.mean, dtype=torch.float64), training.mean(0))
    expected = training.std(0, correction=0)
    torch.testing.assert_close(torch.tensor(loaded.standardization.std, dtype=torch.float64), expected)


def test_inputs_that_do_not_fit_the_moments(run: Path) -> None:
    standardization = ntkfl.Run.load(run).standardization
    assert standardization is not None
    with pytest.raises(DataError, match="floats with 3 features"):
        standardization.standardize(torch.zeros(2, 4))


@pytest.mark.parametrize("projected", [None, 30])
def test_images_are_standardised_by_channel_before_any_projection(projected: int | None, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    sizes, means = (torch.tensor(v).view(3, 1, 1) for v in ([1.0, 20.0, 300.0], [5.0, 100.0, -900.0]))
    x, y = means + sizes * torch.randn(90, 3, 4, 4, generator=draw), torch.randint(0, 2, (90,), generator=draw)
    plain = ntkfl.data.from_clients([(x[:30], y[:30]), (x[30:60], y[30:60])], test=(x[60:], y[60:]))
    trained, privacy = plain.standardized(), ntkfl.methods.Privacy(projected_dim=projected)
    model = nn.Sequential(nn.Flatten(), nn.Linear(projected or 48, 8), nn.Tanh(), nn.Linear(8, 2))
    how = {"privacy": privacy, "rounds": 1, "out": tmp_path / "run", "callbacks": []}
    done = ntkfl.train(model, trained, ntkfl.methods.NTKFL(), **how)
    reached = done.history[-1]["test_loss"]
    assert done.evaluate(*plain.test).loss == pytest.approx(reached, rel=1e-4)
    assert done.evaluate(*trained.test).loss != pytest.approx(reached, rel=1e-2)  # twice is not once
