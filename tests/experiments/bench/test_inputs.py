"""Synthetic images have what makes real ones hard: correlated pixels and one dominant direction."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ntkfl_experiments.bench import inputs
from ntkfl_experiments.bench.inputs import fashion, synthetic

from ntkfl.data.mnist import FASHION


def test_synthetic_is_normalised_correlated_and_repeatable() -> None:
    x, y = synthetic(300)
    assert x.shape == (300, 784)
    assert set(y.tolist()) == set(range(10))
    assert abs(float(x.mean())) < 1e-4
    assert float(x.std()) == pytest.approx(1, abs=1e-4)
    images = x.view(-1, 28, 28)[:, 8:20, 8:20]
    neighbours = torch.corrcoef(torch.stack([images[:, :, 1:].flatten(), images[:, :, :-1].flatten()]))[0, 1]
    assert float(neighbours) > 0.9
    assert torch.equal(x, synthetic(300)[0])


def test_broken_or_missing_data_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(inputs, "locate", lambda name: None)  # this machine may have them where it keeps its own
    assert fashion(5)[2] == "synthetic images"
    monkeypatch.undo()
    monkeypatch.setenv("NTKFL_DATA", str(tmp_path))
    (tmp_path / "fashion-mnist").mkdir()
    for file in FASHION:
        (tmp_path / "fashion-mnist" / file.name).write_bytes(b"cut short")
    x, y, name = fashion(5)
    assert (x.shape, y.shape, name) == ((5, 784), (5,), "synthetic images")
