"""Dirichlet partitions: what is dealt, to whom, and that it has the distribution it is named after."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntkfl.data import Dirichlet
from ntkfl.data.partitions import disjoint, log_dirichlet, shares_reading

BALANCED = np.repeat(np.arange(10), 6000)  # Fashion-MNIST's labels, sorted


def deal(how: Dirichlet, labels: np.ndarray = BALANCED, seed: int = 0) -> list[np.ndarray]:
    return how.assign(labels, None, np.random.default_rng(seed))


def counts(shares: list[np.ndarray], labels: np.ndarray = BALANCED) -> np.ndarray:
    return np.stack([np.bincount(labels[share], minlength=labels.max() + 1) for share in shares])


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_log_dirichlet_has_the_moments_of_a_dirichlet(alpha: float) -> None:
    q = np.exp(log_dirichlet(alpha, (40000, 4), np.random.default_rng(0)))
    np.testing.assert_allclose(q.sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(q.mean(axis=0), 1 / 4, atol=0.01)
    # Var q_c = (1/C)(1 − 1/C)/(Cα + 1), Cov(q_c, q_d) = −(1/C²)/(Cα + 1)
    covariance = np.cov(q.T)
    np.testing.assert_allclose(np.diag(covariance), 3 / 16 / (4 * alpha + 1), rtol=0.05)
    np.testing.assert_allclose(covariance[0, 1], -1 / 16 / (4 * alpha + 1), rtol=0.1)


def test_log_dirichlet_keeps_the_order_of_entries_that_underflow() -> None:
    log_q = log_dirichlet(1e-3, (20000, 5), np.random.default_rng(1))
    assert np.isfinite(log_q).all()
    assert (np.exp(log_q) == 0).mean() > 0.3  # what a plain Dirichlet draw would have lost
    # Renormalised over any classes left, the draw is again symmetric: the second largest is any other class alike.
    second = np.argsort(log_q, axis=1)[:, -2]
    np.testing.assert_allclose(np.bincount(second) / len(second), 1 / 5, atol=0.015)


@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=120).map(np.array),
    share=st.floats(0, 1),
    alpha=st.sampled_from([1e-3, 0.1, 1.0, 1e6]),
    reading=st.sampled_from(["composition", "shares"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=80, deadline=None)
def test_disjoint_partitions_cover_every_row_once_and_leave_no_client_empty(
    labels: np.ndarray, share: float, alpha: float, reading: str, seed: int
) -> None:
    clients = max(1, round(share * len(labels)))
    shares = deal(Dirichlet(clients, alpha, reading), labels, seed)  # type: ignore[arg-type]
    assert len(shares) == clients
    assert min(map(len, shares)) >= 1
    assert sorted(np.concatenate(shares)) == list(range(len(labels)))
    assert all((np.diff(part) > 0).all() for part in shares)
    if reading == "composition":
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=120).map(np.array),
    share=st.floats(0, 1),
    alpha=st.sampled_from([1e-3, 0.1, 1.0, 1e6]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_overlapping_clients_have_no_row_twice_and_no_more_than_their_part(
    labels: np.ndarray, share: float, alpha: float, seed: int
) -> None:
    clients = max(1, round(share * len(labels)))
    for part in deal(Dirichlet(clients, alpha, overlap=True), labels, seed):
        assert 1 <= len(part) <= len(labels) // clients
        assert (np.diff(part) > 0).all()


def test_overlap_has_the_statistics_of_the_authors_files() -> None:
    shares = deal(Dirichlet(clients=300, alpha=0.1, overlap=True))
    sizes = np.array([len(share) for share in shares])
    distinct = len(np.unique(np.concatenate(shares)))
    # Theirs: 59,218 assignments, 37,882 distinct images, 194 to 199 a client.
    assert abs(sizes.sum() - 59218) < 150
    assert sizes.min() >= 193
    assert sizes.max() <= 200
    assert abs(distinct - 37882) < 900
    # Clients draw independently from whole classes: an image of class c is missed with probability Π_m (1 − n_mc/6000).
    expected = 6000 * (1 - np.prod(1 - counts(shares) / 6000, axis=0)).sum()
    assert abs(distinct - expected) < 400


@pytest.mark.parametrize("overlap", [False, True])
def test_composition_is_as_skewed_as_the_dirichlet_says(overlap: bool) -> None:
    n = counts(deal(Dirichlet(clients=300, alpha=0.1, overlap=overlap)))
    concentration = ((n / n.sum(axis=1, keepdims=True)) ** 2).sum(axis=1).mean()
    assert concentration == pytest.approx(1.1 / 2.0, abs=0.05)  # E Σ q_c² = (α + 1)/(Cα + 1)


def test_shares_split_a_class_in_proportion_by_hand() -> None:
    pools = [np.arange(100), np.arange(100, 200)]
    shares = shares_reading(pools, np.log([[0.9, 0.1], [0.6, 0.4]]), np.random.default_rng(0))
    labels = np.repeat([0, 1], 100)
    np.testing.assert_array_equal(counts(shares, labels), [[60, 20], [40, 80]])  # 0.9 : 0.6 and 0.1 : 0.4


def test_an_empty_client_gets_a_row_from_the_largest() -> None:
    pools = [np.arange(10), np.arange(10, 14)]
    shares = shares_reading(pools, np.array([[0.0, -900.0], [-900.0, 0.0], [-900.0, -900.0]]), np.random.default_rng(0))
    assert [len(share) for share in shares] == [9, 4, 1]
    assert shares[2][0] < 10


def test_a_dry_class_is_replaced_by_the_classes_left_in_their_proportion() -> None:
    # Everyone wants class 0, and e times as much of class 1 as of class 2, though both weights underflow to 0.
    labels = np.repeat([0, 1, 2], [30, 30000, 30000])
    pools = [np.flatnonzero(labels == label) for label in range(3)]
    first = []
    for seed in range(20):
        shares = disjoint(pools, np.tile([0.0, -1000.0, -1001.0], (300, 1)), np.random.default_rng(seed))
        n = counts(shares, labels)
        assert (n[:, 0] > 0).sum() == 1  # 30 images, all with the client served first
        first.append(n[n[:, 0] > 0][0])
    total = np.sum(first, axis=0)
    assert total[0] == 20 * 30
    assert total[1] / (total[1] + total[2]) == pytest.approx(np.e / (1 + np.e), abs=0.03)


def test_a_clients_number_says_nothing_about_when_it_is_served() -> None:
    pools = [np.arange(10), np.arange(10, 100)]
    wanting = np.tile([0.0, -1000.0], (10, 1))  # all want class 0, the first one served gets it
    served = [disjoint(pools, wanting, np.random.default_rng(seed)) for seed in range(60)]
    lucky = {next(client for client, share in enumerate(shares) if share.min() < 10) for shares in served}
    assert len(lucky) >= 8


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"reading": "shares"}])
def test_the_stream_decides_everything(options: dict[str, object]) -> None:
    how = Dirichlet(20, 0.3, **options)  # type: ignore[arg-type]
    labels = np.repeat(np.arange(5), 40)
    same = zip(deal(how, labels, 3), deal(how, labels, 3), strict=True)
    assert all(np.array_equal(a, b) for a, b in same)
    other = zip(deal(how, labels, 3), deal(how, labels, 4), strict=True)
    assert not all(np.array_equal(a, b) for a, b in other)
