"""Partitions: what is dealt, to whom, and that it has the distribution it is named after."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntkfl.data import IID, ByWriter, Dirichlet, Shards
from ntkfl.data.partitions import Partition, deal, log_dirichlet
from ntkfl.errors import ConfigError, DataError

BALANCED = np.repeat(np.arange(10), 6000)  # Fashion-MNIST's labels, sorted


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def counts(shares: list[np.ndarray], labels: np.ndarray = BALANCED) -> np.ndarray:
    return np.stack([np.bincount(labels[share], minlength=labels.max() + 1) for share in shares])


@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=120).map(np.array),
    share=st.floats(0, 1),
    alpha=st.sampled_from([1e-3, 0.1, 1.0, 1e6, None]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=80, deadline=None)
def test_every_row_is_dealt_once_in_equal_parts(
    labels: np.ndarray, share: float, alpha: float | None, seed: int
) -> None:
    clients = max(1, round(share * len(labels)))
    how = IID(clients) if alpha is None else Dirichlet(clients, alpha)
    shares = how.assign(labels, None, rng(seed))
    assert len(shares) == clients
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert sorted(np.concatenate(shares)) == list(range(len(labels)))
    assert all((np.diff(part) > 0).all() for part in shares)


@pytest.mark.parametrize("how", [Dirichlet(20, 0.3), IID(20), Shards(20)])
def test_the_stream_decides_everything(how: Partition) -> None:
    labels = np.repeat(np.arange(5), 40)
    first, again, other = (how.assign(labels, None, rng(seed)) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


# --- Dirichlet


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_log_dirichlet_has_the_moments_of_a_dirichlet(alpha: float) -> None:
    q = np.exp(log_dirichlet(alpha, (40000, 4), rng()))
    np.testing.assert_allclose(q.sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(q.mean(axis=0), 1 / 4, atol=0.01)
    # Var q_c = (1/C)(1 − 1/C)/(Cα + 1), Cov(q_c, q_d) = −(1/C²)/(Cα + 1)
    covariance = np.cov(q.T)
    np.testing.assert_allclose(np.diag(covariance), 3 / 16 / (4 * alpha + 1), rtol=0.05)
    np.testing.assert_allclose(covariance[0, 1], -1 / 16 / (4 * alpha + 1), rtol=0.1)


def test_log_dirichlet_keeps_the_order_of_entries_that_underflow() -> None:
    log_q = log_dirichlet(1e-3, (20000, 5), rng(1))
    assert np.isfinite(log_q).all()
    assert (np.exp(log_q) == 0).mean() > 0.3  # what a plain Dirichlet draw would have lost
    # Renormalised over any classes left, the draw is again symmetric: the second largest is any other class alike.
    second = np.argsort(log_q, axis=1)[:, -2]
    np.testing.assert_allclose(np.bincount(second) / len(second), 1 / 5, atol=0.015)


def test_clients_are_as_skewed_as_the_dirichlet_says() -> None:
    n = counts(Dirichlet(clients=300, alpha=0.1).assign(BALANCED, None, rng()))
    concentration = ((n / n.sum(axis=1, keepdims=True)) ** 2).sum(axis=1).mean()
    assert concentration == pytest.approx(1.1 / 2.0, abs=0.05)  # E Σ q_c² = (α + 1)/(Cα + 1)


def test_a_dry_class_is_replaced_by_the_classes_left_in_their_proportion() -> None:
    # Everyone wants class 0, and e times as much of class 1 as of class 2, though both weights underflow to 0.
    labels = np.repeat([0, 1, 2], [30, 30000, 30000])
    pools = [np.flatnonzero(labels == label) for label in range(3)]
    first = []
    for seed in range(20):
        n = counts(deal(pools, np.tile([0.0, -1000.0, -1001.0], (300, 1)), rng(seed)), labels)
        assert (n[:, 0] > 0).sum() == 1  # 30 images, all with the client served first
        first.append(n[n[:, 0] > 0][0])
    total = np.sum(first, axis=0)
    assert total[0] == 20 * 30
    assert total[1] / (total[1] + total[2]) == pytest.approx(np.e / (1 + np.e), abs=0.03)


def test_a_clients_number_says_nothing_about_when_it_is_served() -> None:
    pools = [np.arange(10), np.arange(10, 100)]
    wanting = np.tile([0.0, -1000.0], (10, 1))  # all want class 0, the first one served gets it
    served = [deal(pools, wanting, rng(seed)) for seed in range(60)]
    lucky = {next(client for client, share in enumerate(shares) if share.min() < 10) for shares in served}
    assert len(lucky) >= 8


# --- IID, shards and writers


def test_iid_clients_have_the_classes_of_the_whole() -> None:
    n = counts(IID(300).assign(BALANCED, None, rng()))
    assert ((n - 20) ** 2 / 20).sum() / (300 * 9) == pytest.approx(1, abs=0.15)


def test_shards_hold_few_classes_and_cover_every_row() -> None:
    labels = rng(1).permutation(np.repeat(np.arange(10), 600))
    parts = Shards(clients=50, per_client=2).assign(labels, None, rng())
    assert sorted(np.concatenate(parts)) == list(range(6000))
    assert {len(part) for part in parts} == {120}
    # 100 shards of 60 sorted rows lie inside one class each, so two shards hold one or two.
    held = [len(np.unique(labels[part])) for part in parts]
    assert set(held) <= {1, 2}
    assert np.mean(held) == pytest.approx(1 + 90 / 99, abs=0.15)  # the second shard is of another class
    part = Shards(clients=10, per_client=1).assign(np.repeat([0, 1], 500), None, rng())[0]
    assert np.diff(part).max() > 5  # a run of the sorted file would have gaps of one


WRITERS = rng(2).permutation(np.repeat([3, 5, 8, 13], [4, 16, 20, 30]))


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


def test_what_cannot_be_dealt_is_an_error() -> None:
    with pytest.raises(DataError, match="does not say who wrote"):
        ByWriter().assign(np.zeros(3, np.int64), None, rng())
    with pytest.raises(ConfigError, match="5 clients asked for, but 3 writers have at least 16"):
        ByWriter(clients=5).assign(np.zeros(70, np.int64), WRITERS, rng())
    with pytest.raises(ConfigError, match="0 writers have at least 99"):
        ByWriter(min_samples=99).assign(np.zeros(70, np.int64), WRITERS, rng())
    with pytest.raises(ConfigError, match="4 clients of at least 1 cannot share 3 samples"):
        Dirichlet(4, 0.1).assign(np.zeros(3, np.int64), None, rng())
    for wrong in (lambda: IID(0), lambda: Shards(3, 0), lambda: Dirichlet(3, 0.0)):
        with pytest.raises(ConfigError, match="must be"):
            wrong()
