"""Configurations: each partition gets the options it takes."""

from __future__ import annotations

import pytest

from ntkfl.data import IID, ByWriter, Dirichlet, Shards
from ntkfl.engine.config import DataConfig


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
