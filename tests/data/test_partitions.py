"""IID, shards and writers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntkfl.data import IID, ByWriter, Shards
from ntkfl.data.partitions import PARTITIONS, make
from ntkfl.errors import ConfigError, DataError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(st.integers(1, 200), st.floats(0, 1), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_iid_deals_every_row_once_in_equal_parts(rows: int, share: float, seed: int) -> None:
    clients = max(1, round(share * rows))
    parts = IID(clients).assign(np.zeros(rows, np.int64), None, rng(seed))
    sizes = [len(part) for part in parts]
    assert len(parts) == clients
    assert max(sizes) - min(sizes) <= 1
    assert sorted(np.concatenate(parts)) == list(range(rows))


def test_iid_clients_have_the_classes_of_the_whole() -> None:
    labels = np.repeat(np.arange(10), 6000)
    n = np.stack([np.bincount(labels[part], minlength=10) for part in IID(300).assign(labels, None, rng())])
    assert ((n - 20) ** 2 / 20).sum() / (300 * 9) == pytest.approx(1, abs=0.15)


def test_shards_hold_few_classes_and_cover_every_row() -> None:
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 600))
    parts = Shards(clients=50, per_client=2).assign(labels, None, rng())
    assert sorted(np.concatenate(parts)) == list(range(6000))
    assert {len(part) for part in parts} == {120}
    # 100 shards of 60 sorted rows lie inside one class each, so two shards hold one or two.
    held = [len(np.unique(labels[part])) for part in parts]
    assert set(held) <= {1, 2}
    assert np.mean(held) == pytest.approx(1 + 90 / 99, abs=0.15)  # the second shard is of another class


def test_shards_are_random_parts_of_their_class() -> None:
    labels = np.repeat([0, 1], 500)
    part = Shards(clients=10, per_client=1).assign(labels, None, rng())[0]
    assert np.diff(part).max() > 5  # a run of the sorted file would have gaps of one


WRITERS = np.random.default_rng(2).permutation(np.repeat([3, 5, 8, 13], [4, 16, 20, 30]))


def test_writers_are_clients_and_small_ones_are_left_out() -> None:
    parts = ByWriter().assign(np.zeros(70, np.int64), WRITERS, rng())
    assert [set(WRITERS[part]) for part in parts] == [{5}, {8}, {13}]
    assert [len(part) for part in parts] == [16, 20, 30]
    assert all((np.diff(part) > 0).all() for part in parts)
    assert len(ByWriter(min_samples=17).assign(np.zeros(70, np.int64), WRITERS, rng())) == 2


def test_fewer_writers_are_chosen_by_the_seed() -> None:
    chosen = set()
    for seed in range(60):
        parts = ByWriter(clients=2, min_samples=1).assign(np.zeros(70, np.int64), WRITERS, rng(seed))
        names = tuple(int(WRITERS[part[0]]) for part in parts)
        assert names == tuple(sorted(names))
        assert [len(part) for part in parts] == [(name == WRITERS).sum() for name in names]
        chosen.add(names)
    assert len(chosen) == 6  # every pair of four comes up


def test_writers_that_are_not_there_are_an_error() -> None:
    with pytest.raises(DataError, match="does not say who wrote"):
        ByWriter().assign(np.zeros(3, np.int64), None, rng())
    with pytest.raises(ConfigError, match="5 clients asked for, but 3 writers have at least 16"):
        ByWriter(clients=5).assign(np.zeros(70, np.int64), WRITERS, rng())
    with pytest.raises(ConfigError, match="0 writers have at least 99"):
        ByWriter(min_samples=99).assign(np.zeros(70, np.int64), WRITERS, rng())


def test_partitions_are_made_by_name_and_describe_themselves() -> None:
    options = {
        "dirichlet": {"clients": 3, "alpha": 0.5, "reading": "shares", "overlap": False},
        "writer": {"clients": 3, "min_samples": 4},
        "iid": {"clients": 3},
        "shards": {"clients": 3, "per_client": 4},
        "client": {},
    }
    assert set(options) == set(PARTITIONS)
    for kind, given_options in options.items():
        assert make(kind, given_options).describe() == {"kind": kind, **given_options}
    assert ByWriter().describe() == {"kind": "writer", "min_samples": 16}  # TOML has no null
    assert type(IID(np.int64(3)).describe()["clients"]) is int  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("dirichle", {}, "did you mean 'dirichlet'"),
        ("iid", {"clients": 3, "alpha": 1.0}, "alpha is no option of partition 'iid': it takes clients"),
        ("dirichlet", {"clients": 3}, "partition 'dirichlet' needs alpha"),
    ],
)
def test_wrong_names_and_options_are_refused(kind: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(kind, options)
