"""torch Datasets and DataLoaders as clients: the federation that their arrays give, and errors that name the item."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ntkfl.data import IID, Federated, Shards, from_clients, from_datasets
from ntkfl.errors import DataError

X, Y = torch.arange(60, dtype=torch.float32).view(20, 3), torch.arange(20) % 4
TEST = (X[:5], Y[:5])


class Pictures(Dataset[Any]):
    """Like torchvision's: items are made one by one, with a transform."""

    def __init__(self, items: list[Any], transform: Any = lambda item: item) -> None:
        self.items, self.transform = items, transform

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.transform(self.items[i])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter([(x, int(y)) for x, y in zip(X, Y, strict=True)])


def as_items(x: Tensor, y: Tensor) -> list[Any]:
    return [(a.numpy(), int(b)) for a, b in zip(x, y, strict=True)]


SOURCES = {
    "tensors": TensorDataset(X, Y),
    "items of arrays": Pictures(as_items(X, Y)),
    "a transform": Pictures(list(range(20)), lambda i: (X[i], Y[i])),
    "a subset": Subset(TensorDataset(X, Y), range(20)),
    "several joined": ConcatDataset([TensorDataset(X[:7], Y[:7]), TensorDataset(X[7:], Y[7:])]),
    "a stream": Stream(),
    "batches": DataLoader(TensorDataset(X, Y), batch_size=6),
    "batches of items": DataLoader(Pictures(as_items(X, Y)), batch_size=20),
    "single items": DataLoader(TensorDataset(X, Y), batch_size=None),
    "batches of a stream": DataLoader(Stream(), batch_size=7),
}


def same(a: Federated, b: Federated) -> bool:
    return a.fingerprint() == b.fingerprint()


@pytest.mark.parametrize("name", SOURCES)
def test_clients_and_test_set_are_those_of_the_arrays(name: str) -> None:
    arrays = from_clients([(X, Y), (X[:8], Y[:8])], test=(X, Y))
    assert same(from_clients([SOURCES[name], (X[:8], Y[:8])], test=SOURCES[name]), arrays)


class Picture:
    """As PIL's: it can be converted, and is no array."""

    def convert(self) -> None: ...


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (Pictures([{"image": 1, "label": 2}]), r"client 0: item 0 is a dict; every item must be a pair \(x, y\)"),
        (DataLoader(TensorDataset(X), batch_size=5), "client 0: batch 0 is 1 parts; every item must be a pair"),
        (Pictures([(X[0], 1), (X[0, :2], 1)]), r"item 1 has x of shape \[2\], but item 0 has \[3\]"),
        (Pictures([(X[0], 1), (X[0], 0.5)]), "item 1 has y of torch.float32, but item 0 has torch.int64"),
        (Pictures([(X[0], "cat")]), "item 0 has the label 'cat': labels must be integers 0, 1, …"),
        (Pictures([(Picture(), 1)]), "x of type Picture, not a tensor or array of numbers: .* a transform that makes"),
        (Dataset(), "Dataset has no length: define __len__"),
        (DataLoader(TensorDataset(X, Y), collate_fn=lambda b: (torch.ones(2, 3), torch.ones(3))), r"y of shape \[3\]"),
        ("/data", r"client 0 must be a pair \(x, y\), a torch Dataset or a DataLoader, not str"),
    ],
)
def test_errors_name_the_item(source: Any, why: str) -> None:
    with pytest.raises(DataError, match=why):
        from_clients([source], test=TEST)


def test_one_dataset_is_dealt_by_a_partition() -> None:
    fed = from_datasets(TensorDataset(X, Y), test=TensorDataset(*TEST), partition=Shards(clients=4), seed=3)
    assert sorted(torch.cat(fed.indices).tolist()) == list(range(20))
    assert [len(set(fed.client(i)[1].tolist())) <= 2 for i in range(4)] == [True] * 4
    assert same(fed, from_datasets((X, Y), test=TEST, partition=Shards(clients=4), seed=3))
    assert not same(fed, from_datasets((X, Y), test=TEST, partition=Shards(clients=4), seed=4))
    assert fed.describe()["partition"] == {"kind": "shards", "clients": 4, "per_client": 2}
    real = from_datasets((X, X[:, :2]), test=(X, X[:, :2]), partition=IID(clients=5))
    assert real.sizes == [4] * 5


class Augmented(Dataset[Any]):
    """Items with noise on x, as of a random transform, or without."""

    def __init__(self, noise: float) -> None:
        self.noise, self.x, self.y = noise, torch.randn(30, 4), torch.arange(30) % 3

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.x[i] + self.noise * torch.randn(4), int(self.y[i])


def jittered(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])
    return x + torch.randn(len(x), 1), y


@pytest.mark.parametrize(
    "source",
    [
        Augmented(0.1),
        DataLoader(Augmented(0.1), batch_size=7, shuffle=True),
        DataLoader(Augmented(0.0), batch_size=7, collate_fn=jittered),
    ],
)
def test_a_random_transform_is_told_of(source: Any) -> None:
    with pytest.warns(UserWarning, match="every round trains on one draw of each and nothing is augmented"):
        fed = from_clients([source], test=(torch.randn(5, 4), torch.arange(5) % 3))
    assert fed.sizes == [30]


@pytest.mark.parametrize(
    "source", [Augmented(0.0), DataLoader(Augmented(0.0), batch_size=7, shuffle=True), DataLoader(Augmented(0.0), None)]
)
def test_items_that_stay_as_they_are_are_not(source: Any, recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(5)
    from_clients([source], test=(torch.randn(5, 4), torch.arange(5) % 3))
    assert not [warning for warning in recwarn if "read again" in str(warning.message)]
