"""Configurations: each partition gets the options it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ntkfl.data import IID, ByWriter, Dirichlet, Shards
from ntkfl.engine.config import DataConfig, ModelConfig, RunConfig
from ntkfl.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("dirichlet", Dirichlet(clients=7, alpha=0.3, reading="shares")),
        ("writer", ByWriter(clients=7, min_samples=5)),
        ("iid", IID(clients=7)),
        ("shards", Shards(clients=7, per_client=4)),
    ],
)
def test_partitions(kind: str, expected: object) -> None:
    config = DataConfig(
        dataset="digits", partition=kind, clients=7, alpha=0.3, reading="shares", min_samples=5, shards_per_client=4
    )
    assert config.how() == expected


@pytest.mark.parametrize(
    "text",
    [
        "self = 1",
        "[method]\nname = []",
        '[method]\nname = "fedavg"\nself = 1',
        "simulation = true\nmodel = 3",
        "a = " + "[" * 10_000,
        "a." * 20_000 + "a = 1",
        '"a" . ' * 20_000 + "a = 1",
        "seed = " + "9" * 5000,
    ],
)
def test_a_file_that_is_no_run_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        RunConfig.read(tmp_path / "run.toml").build_method()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("hidden", [(-1,), (10**12,), (10**30,)])
def test_a_network_that_cannot_be_is_refused_before_there_is_any_of_it(hidden: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"model 'mlp'|perceptron needs"):
        ModelConfig(hidden=hidden).build((64,), 10, seed=0)
