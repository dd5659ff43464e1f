"""The backbone's figures: what is compared is the same data, settings are chosen on held-out clients alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ntkfl_experiments.backbone import averaging, private
from ntkfl_experiments.backbone.measure import KFAC, RIDGE
from ntkfl_experiments.backbone.trials import CHOSEN_ON, PARTITIONS, SEEDS, HeadTrial, Table
from ntkfl_experiments.backbone.tuning import folded
from torch import nn


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    """1,200 samples of ten classes with 12 features."""
    path: Path = tmp_path_factory.mktemp("features") / "features.npz"
    draw = np.random.default_rng(0)
    means, arrays = 2 * draw.standard_normal((10, 12)), {}
    for part, count in (("train", 1000), ("test", 200)):
        arrays[f"y_{part}"] = np.arange(count, dtype=np.uint8) % 10
        noise = draw.standard_normal((count, 12))
        arrays[f"x_{part}"] = (means[arrays[f"y_{part}"]] + noise).astype(np.float16)
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return Table(path)


def test_seeds_that_choose_do_not_report() -> None:
    assert not set(CHOSEN_ON) & set(SEEDS)
    trials = averaging.searches("fedavg", "α = 0.1") + private.gradient_searches()
    assert all(trial.held and trial.seed in CHOSEN_ON for trial in trials)
    assert {len(averaging.settings(method)) for method in averaging.GRIDS} == {12}


def test_sums_do_not_depend_on_how_samples_are_dealt(table: Table) -> None:
    found = [
        table.play(HeadTrial("ridge", part, 20, RIDGE | {"penalty": 1e-3}, 1, 100))["accuracy"] for part in PARTITIONS
    ]
    assert found[0] == found[1] == found[2]
    assert found[0][0] > 80


def test_held_out_clients_are_tested_and_do_not_train(table: Table) -> None:
    fed = table.split("one label per client", 10)
    assert len(fed) == 80
    x, _ = fed.test
    seen = torch.cat([fed.client(i)[0] for i in range(80)])
    assert len(x) + len(seen) == 1000
    assert float(torch.cdist(x, seen).min()) > 0
    value = table.play(HeadTrial("K-FAC", "one label per client", 10, KFAC | {"mu": 2.0}, 1, 100, held=True))
    assert value["accuracy"][0] > 50


def test_the_best_setting_is_by_mean_over_seeds() -> None:
    trials = [
        HeadTrial(name, "α = 0.1", seed, {"name": name}, 2, 1, held=True) for name in ("a", "b") for seed in (10, 11)
    ]
    values = dict(zip((t.key for t in trials), ([0.0, 90.0], [0.0, 10.0], [60.0, 60.0], [60.0, 20.0]), strict=True))
    found = {key: {"accuracy": value} for key, value in values.items()}
    assert averaging.best(trials, found).name == "b"
    assert averaging.best(trials[::2], found, last=1).name == "a"
    assert averaging.at_the_edge("fedavg", {"lr": 3.0, "local_steps": 50}) == ["lr"]


def test_a_folded_layer_is_the_convolution_and_its_normalisation() -> None:
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(4, 6, 1, bias=False), nn.BatchNorm2d(6)
    norm(conv(torch.randn(50, 4, 3, 3)))  # running statistics
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 4, 3, 3)
    expected = norm.eval()(conv(x)).permute(0, 2, 3, 1)
    assert torch.allclose(folded(conv, norm)(x.permute(0, 2, 3, 1)), expected, atol=1e-5)
