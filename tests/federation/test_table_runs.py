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
from ntkfl.federation.simulation import execute

FEATURES = ("age", "crp mg/l", "Hb")
SIZES = np.array([10.0, 500.0, 0.01])


def write_table(path: Path, rows: int = 400) -> Path:
    """Columns of sizes far apart and far from 0; the label follows from `age` alone."""
    z = np.random.default_rng(0).standard_normal((rows, len(FEATURES)))
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*FEATURES, "outcome", "site"])
        for i, row in enumerate((5 * SIZES + SIZES * z).tolist()):
            table.writerow([*row, "ill" if z[i, 0] > 0 else "well", f"s{i % 4}"])
    return path


def test_standardisation_goes_with_the_folder(tmp_path: Path) -> None:
    table = write_table(tmp_path / "raw.csv")
    own = {"dataset": str(table), "label_column": "outcome", "client_column": "site", "standardize": True}
    model, method = {"name": "mlp", "hidden": [30]}, {"name": "sum-ridge"}
    reached = execute(RunConfig(rounds=1, data=own, model=model, method=method), out=tmp_path / "run").history[-1]
    data, loaded = from_file(table, label="outcome", client="site"), ntkfl.Run.load(tmp_path / "run")
    x, y = data.test_rows.take()
    assert reached["test_accuracy"] > 0.9
    assert loaded.evaluate(x, y).accuracy == reached["test_accuracy"]
    with torch.no_grad():  # the network alone does not know the inputs' sizes
        assert float((loaded.model(x).argmax(1) == y).double().mean()) < 0.8
    moments, training = loaded.standardization, data.rows.x.double()
    assert moments is not None
    torch.testing.assert_close(torch.tensor(moments.mean, dtype=torch.float64), training.mean(0))
    torch.testing.assert_close(torch.tensor(moments.std, dtype=torch.float64), training.std(0, correction=0))
    with pytest.raises(DataError, match="floats with 3 features"):
        moments.standardize(torch.zeros(2, 4))


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
