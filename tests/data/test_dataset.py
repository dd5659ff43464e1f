"""Datasets: normalisation, partitions by seed, and rows taken out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ntkfl.data import ByWriter, Dataset, Dirichlet, Federated, load
from ntkfl.data.partitions import Indices, Partition
from ntkfl.data.table import TableRows
from ntkfl.errors import DataError


def small(rows: int = 40, channels: int = 2) -> Dataset:
    """Every image is one grey level, its own row number, so that rows can be told apart."""
    images = torch.arange(rows, dtype=torch.uint8).view(-1, 1, 1, 1).expand(rows, channels, 3, 3).contiguous()
    labels, moments = torch.arange(rows) % 4, ((0.1, 0.2)[:channels], (0.5, 0.25)[:channels])
    return Dataset(
        name="small",
        rows=TableRows(images, labels, *moments),
        test_rows=TableRows(images[:5].clone(), labels[:5].clone(), *moments),
        classes=4,
        writers=torch.arange(rows) // 10,
    )


def rows_of(x: torch.Tensor) -> list[int]:
    """The row numbers behind normalised images of `small`."""
    return ((x[:, 0, 0, 0] * 0.5 + 0.1) * 255).round().int().tolist()


def test_rows_are_normalised_channel_by_channel_when_asked_for() -> None:
    dataset = small()
    x, y = dataset.rows.take(torch.tensor([30, 7]))
    assert x.dtype == torch.float32
    assert x.shape == (2, 2, 3, 3)
    assert x[0, 0, 0, 0].item() == pytest.approx((30 / 255 - 0.1) / 0.5)
    assert x[1, 1, 2, 2].item() == pytest.approx((7 / 255 - 0.2) / 0.25)
    assert y.tolist() == [2, 3]
    assert dataset.rows.x.dtype == torch.uint8
    assert dataset.rows.x[30, 0, 0, 0] == 30


def test_clients_share_the_dataset_and_copy_nothing() -> None:
    dataset = small()
    federated = dataset.partition(Dirichlet(clients=4, alpha=0.5, overlap=True))
    assert federated.rows.x.data_ptr() == dataset.rows.x.data_ptr()
    x, y = federated.client(2)
    assert rows_of(x) == federated.indices[2].tolist()
    assert torch.equal(y, dataset.rows.y[federated.indices[2]])


def test_rows_taken_out_are_gone_and_the_rest_is_whole() -> None:
    dataset = small()
    rest, x, y = dataset.without(0.25, seed=3)
    taken = rows_of(x)
    assert len(taken) == len(set(taken)) == 10
    assert torch.equal(y, dataset.rows.y[taken])
    left = rest.rows.x[:, 0, 0, 0].tolist()
    assert sorted(taken + left) == list(range(40))
    assert torch.equal(rest.rows.y, dataset.rows.y[left])
    assert rest.writers is not None
    assert rest.writers.tolist() == [row // 10 for row in left]
    assert rows_of(dataset.without(0.25, seed=3)[1]) == taken
    assert rows_of(dataset.without(0.25, seed=4)[1]) != taken
    federated = rest.partition(ByWriter(min_samples=1), seed=9)
    assert sum(federated.sizes) == 30
    assert federated.describe()["without"] == [{"fraction": 0.25, "seed": 3}]


def test_rows_taken_out_are_uniformly_random() -> None:
    hits = np.zeros(40)
    for seed in range(400):
        hits[rows_of(small().without(0.25, seed)[1])] += 1
    # Binomial(400, 1/4): mean 100, standard deviation 8.7.
    assert hits.min() > 65
    assert hits.max() < 135


ROWS = small().rows


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": TableRows(ROWS.x[:0], ROWS.y[:0])}, "0 training rows with targets"),
        ({"rows": TableRows(ROWS.x, ROWS.y[1:])}, "40 training rows with targets"),
        ({"test_rows": TableRows(ROWS.x[:5], torch.full((5,), 4))}, r"test labels must lie in 0\.\.3, not 4\.\.4"),
        ({"rows": TableRows(ROWS.x, torch.full((40,), -1))}, r"training labels must lie in 0\.\.3, not -1\.\.-1"),
        ({"test_rows": TableRows(torch.zeros(5, 2, 4, 3), ROWS.y[:5])}, "differ in shape"),
        ({"writers": torch.zeros(3)}, "3 writers for 40"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, TableRows], said: str) -> None:
    with pytest.raises(DataError, match=said):
        replace(small(), **change)


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ([], "at least one client"),
        ([[0], []], "client 1 has no samples"),
        ([[0], [40]], "client 1 has a row outside"),
        ([[0], [-1]], "client 1 has a row outside"),
    ],
)
def test_a_partition_of_ones_own_is_checked(shares: list[list[int]], said: str) -> None:
    class Given(Partition):
        kind = "given"

        def assign(self, labels: Indices, writers: Indices | None, rng: np.random.Generator) -> list[Indices]:
            return [np.array(share, np.int64) for share in shares]

        def describe(self) -> dict[str, object]:
            return {"kind": self.kind}

    with pytest.raises(DataError, match=said):
        small().partition(Given())


def test_the_contract() -> None:
    federated = load("digits").partition(Dirichlet(clients=30, alpha=0.1), seed=0)
    assert isinstance(federated, Federated)
    assert len(federated) == 30
    assert federated.input_shape == (1, 8, 8)
    assert federated.output_dim == federated.classes == 10
    assert federated.name == "digits"
