"""The backbone's figures: what is compared is the same data, settings are chosen on held-out clients alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ntkfl_experiments import backbone
from ntkfl_experiments.backbone import CHOSEN_ON, GRIDS, ONE_LABEL, SEEDS, SKEWED, Table, Trial, best

MEASURED = json.loads((Path(__file__).parents[2] / "results" / "backbone" / "measured.json").read_text())


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


def test_seeds_that_choose_do_not_report_and_all_search_as_much() -> None:
    assert not set(CHOSEN_ON) & set(SEEDS)
    trials = backbone.searches("fedavg", SKEWED) + backbone.curvature_searches()
    assert all(trial.held and trial.seed in CHOSEN_ON for trial in trials)
    assert {len(backbone.searches(method, SKEWED)) for method in GRIDS} == {12 * len(CHOSEN_ON)}


def test_what_was_measured_is_what_is_chosen_and_reported() -> None:
    for method in GRIDS:
        for part in (ONE_LABEL, SKEWED):
            chosen = MEASURED[f"chosen / {method} / {part}"]
            assert best(backbone.searches(method, part), MEASURED).items() <= chosen.items()
    assert best(backbone.curvature_searches(), MEASURED, last=1)["mu"] == MEASURED["chosen / K-FAC"]["mu"]
    keys = {
        trial.key for trial in backbone.fixed_reports() + backbone.curvature_reports({}) if "8 bits" not in trial.name
    }
    assert keys <= set(MEASURED)


def test_sums_do_not_depend_on_how_samples_are_dealt(table: Table) -> None:
    found = [
        table.play(Trial("ridge", part, 20, backbone.RIDGE | {"penalty": 1e-3}, 1))["accuracy"]
        for part in backbone.PARTITIONS
    ]
    assert found[0] == found[1] == found[2]
    assert found[0][0] > 80


def test_held_out_clients_are_tested_and_do_not_train(table: Table) -> None:
    fed = table.split(ONE_LABEL, 10)
    assert len(fed) == 80
    x, _ = fed.test
    seen = torch.cat([fed.client(i)[0] for i in range(80)])
    assert len(x) + len(seen) == 1000
    assert float(torch.cdist(x, seen).min()) > 0
    value = table.play(Trial("K-FAC", ONE_LABEL, 10, backbone.KFAC | {"mu": 2.0}, 1, held=True))
    assert value["accuracy"][0] > 50


def test_noise_of_private_ridge_costs_accuracy_and_no_more(table: Table) -> None:
    trial = next(trial for trial in backbone.fixed_reports() if trial.name == "private-ridge ε 3, unit")
    assert 20 < table.play(trial)["accuracy"][0] < 100
