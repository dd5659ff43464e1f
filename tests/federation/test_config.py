"""Configurations: each partition gets the options it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ntkfl.data import IID, ByWriter, Dirichlet, Shards
from ntkfl.errors import ConfigError
from ntkfl.federation.config import DataConfig, RunConfig, load_data
from ntkfl.federation.simulation import execute


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("dirichlet", Dirichlet(clients=7, alpha=0.3)),
        ("writer", ByWriter(clients=7, min_samples=5)),
        ("iid", IID(clients=7)),
        ("shards", Shards(clients=7, per_client=4)),
    ],
)
def test_partitions(kind: str, expected: object) -> None:
    config = DataConfig(dataset="digits", partition=kind, clients=7, alpha=0.3, min_samples=5, shards_per_client=4)
    assert config.how() == expected


OWN = """
import numpy as np
import ntkfl

def clients():
    rng = np.random.default_rng(0)
    pairs = [(x, (x[:, 0] > 0).astype(int)) for x in (rng.normal(size=(20, 3)) for _ in range(4))]
    return ntkfl.data.from_clients(pairs[:3], test=pairs[3])

def pair():
    return clients().client(0)
"""


def test_clients_of_ones_own_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_config_clients.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    common = {"rounds": 1, "clients_per_round": 3, "model": {"hidden": [4]}}
    config = RunConfig(data={"dataset": "own_config_clients:clients"}, method={"name": "ntk-fl"}, **common)
    assert load_data(config).sizes == [20, 20, 20]
    public = config.model_copy(update={"data": DataConfig(dataset=config.data.dataset, mean=(1,) * 3, std=(2,) * 3)})
    execute(public, out=tmp_path / "public")
    assert RunConfig.read(tmp_path / "public" / "config.toml", allow_code=True).data == public.data
    assert load_data(public).test[0].equal((load_data(config).test[0] - 1) / 2)
    execute(config, out=tmp_path / "run")
    assert RunConfig.read(tmp_path / "run" / "config.toml", allow_code=True).data.dataset == config.data.dataset
    assert "alpha" not in (tmp_path / "run" / "config.toml").read_text()  # they come dealt
    for dataset, method, message in (
        ("own_config_clients:pair", "ntk-fl", "must give clients"),
        ("own_config_clients:nobody", "ntk-fl", "no function 'nobody'"),
        ("not_there:clients", "ntk-fl", "cannot import 'not_there'"),
        ("own_config_clients:clients", "data-share", "own clients come dealt"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_data(RunConfig(data={"dataset": dataset}, method={"name": method}, **common))
