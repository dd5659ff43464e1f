"""Clients of one's own: arrays, torch Datasets and DataLoaders, folders; and what is wrong with them in one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from typer.testing import CliRunner

import ntkfl
from ntkfl.cli import app
from ntkfl.data import IID, Federated, Shards, from_clients, from_datasets, from_folders, pictures
from ntkfl.data.files import open_dataset, own_digest
from ntkfl.errors import ConfigError, DataError, ModelError
from ntkfl.federation.config import RunConfig, load_data
from ntkfl.methods import METHODS, FedAvg

# --- arrays

X = np.arange(12, dtype=np.float64).reshape(4, 3)
Y = np.array([0, 2, 1, 0])
TEST = (X[:2], Y[:2])


def test_own_arrays_are_clients() -> None:
    federated = from_clients([(X, Y), (torch.tensor(X[:1]), torch.tensor([4]))], test=TEST)
    x, y = federated.client(1)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert x.tolist() == [[0.0, 1.0, 2.0]]
    assert y.tolist() == [4]
    assert federated.client(0)[0].tolist() == X.tolist()
    assert federated.sizes == [4, 1]
    assert federated.classes == federated.output_dim == 5
    assert federated.input_shape == (3,)
    assert federated.test[1].tolist() == [0, 2]
    assert federated.counts().tolist() == [[2, 1, 1, 0, 0], [0, 0, 0, 0, 1]]
    assert federated.describe() == {"dataset": "own", "clients": 2, "samples": 5, "test_samples": 2}


def test_classes_are_the_largest_label_of_all_or_what_is_said() -> None:
    assert from_clients([(X, Y)], test=(X, np.array([0, 0, 0, 7]))).classes == 8
    assert from_clients([(X, np.zeros(4, int))], test=(X, np.zeros(4, int))).classes == 2
    assert from_clients([(X, np.array([True, False, True, True]))], test=TEST, classes=3).classes == 3
    assert from_clients([(X, Y.astype(np.uint8))], test=TEST, classes=10).classes == 10


@pytest.mark.parametrize("width", [None, 1, 2])
def test_float_targets_are_regression(width: int | None) -> None:
    y = np.linspace(0, 1, 4) if width is None else np.ones((4, width)) * 0.5
    federated = from_clients([(X, y), (X, y)], test=(X, y))
    assert federated.classes is None
    assert federated.output_dim == (width or 1)
    assert federated.client(0)[1].shape == (4, width or 1)
    assert federated.client(0)[1].dtype == torch.float32
    with pytest.raises(DataError, match="no classes to count"):
        federated.counts()


def test_originals_may_change_afterwards() -> None:
    x, y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    federated = from_clients([(x, y)], test=(x, y))
    x += 1
    y += 1
    assert federated.client(0)[0].sum() == federated.test[0].sum() == 0
    assert federated.client(0)[1].sum() == 0


def test_clients_and_classes_by_name() -> None:
    x, y = torch.ones(4, 2), torch.tensor([0, 1, 0, 1])
    fed = from_clients({"north": (x, y), "south": (2 * x, y)}, test=(x, y), class_names=["no", "yes"])
    assert (fed.client_names, fed.class_names, fed.classes) == (("north", "south"), ("no", "yes"), 2)
    with pytest.raises(DataError, match="client south: x has a value that is not finite"):
        from_clients({"north": (x, y), "south": (x / 0, y)}, test=(x, y))
    with pytest.raises(DataError, match="1 names for 2 classes"):
        from_clients([(x, y)], test=(x, y), classes=2, class_names=["no"])


def test_a_regression_model_on_whole_numbers_is_told_to_make_floats() -> None:
    x, y = torch.randn(12, 3), torch.arange(12)
    with pytest.raises(ModelError, match="for regression make floats of them"):
        ntkfl.train(torch.nn.Linear(3, 1), from_clients([(x, y)], test=(x, y)), FedAvg(loss="mse"), rounds=1)


@pytest.mark.parametrize(
    ("clients", "test", "why"),
    [
        ([], TEST, "at least one client"),
        ([(X, Y)], None, "test must be a pair"),
        ([(X, Y), (X[:0], Y[:0])], TEST, "client 1 has no samples"),
        ([(X, Y)], (X[:, :2], Y), r"test has features \[2\]"),
        ([(X, Y * np.nan)], (X, Y * 1.0), "client 0: y has a value that is not finite"),
        ([(X, Y), (X, Y[:3])], TEST, r"client 1 has 4 samples, so y must be integer labels \[n\], not \[3\]"),
        ([(X, Y), (X, Y - 1)], TEST, r"client 1: labels must lie in 0\.\.2, not -1\.\.1"),
        ([(X, Y), (X, Y * 0.5)], TEST, "regression targets of width 1, but client 0 has .* integer labels"),
        (
            [(X, Y[:, None])],
            TEST,
            r"y must be integer labels \[n\].*; several labels per sample are real targets: make floats",
        ),
        ([(X, np.ones((4, 2, 2)))], TEST, "y must be regression targets"),
        ([(X[:, 0], Y)], TEST, "client 0 has no samples"),
        ([(X * 1j, Y)], TEST, "client 0: x must hold numbers, not complex128"),
        ([X], TEST, r"client 0 must be a pair \(x, y\), a torch Dataset or a DataLoader, not ndarray"),
    ],
)
def test_arrays_that_cannot_work_are_named(clients: Any, test: Any, why: str) -> None:
    with pytest.raises(DataError, match=why) as caught:
        from_clients(clients, test=test)
    assert "\n" not in str(caught.value)


# --- torch Datasets and DataLoaders

XS, YS = torch.arange(60, dtype=torch.float32).view(20, 3), torch.arange(20) % 4


class Items(Dataset[Any]):
    """Like torchvision's: items are made one by one, with a transform."""

    def __init__(self, items: list[Any], transform: Any = lambda item: item) -> None:
        self.items, self.transform = items, transform

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.transform(self.items[i])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter([(x, int(y)) for x, y in zip(XS, YS, strict=True)])


ARRAYS = [(a.numpy(), int(b)) for a, b in zip(XS, YS, strict=True)]
SOURCES = {
    "tensors": TensorDataset(XS, YS),
    "items of arrays": Items(ARRAYS),
    "a transform": Items(list(range(20)), lambda i: (XS[i], YS[i])),
    "a subset": Subset(TensorDataset(XS, YS), range(20)),
    "several joined": ConcatDataset([TensorDataset(XS[:7], YS[:7]), TensorDataset(XS[7:], YS[7:])]),
    "a stream": Stream(),
    "batches": DataLoader(TensorDataset(XS, YS), batch_size=6),
    "batches of items": DataLoader(Items(ARRAYS), batch_size=20),
    "batches of a stream": DataLoader(Stream(), batch_size=7),
}


def same(a: Federated, b: Federated) -> bool:
    return a.fingerprint() == b.fingerprint()


@pytest.mark.parametrize("name", SOURCES)
def test_clients_and_test_set_are_those_of_the_arrays(name: str) -> None:
    arrays = from_clients([(XS, YS), (XS[:8], YS[:8])], test=(XS, YS))
    state = torch.get_rng_state()
    assert same(from_clients([SOURCES[name], (XS[:8], YS[:8])], test=SOURCES[name]), arrays)
    if not isinstance(SOURCES[name], DataLoader):  # of which each pass draws a seed
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            Items([{"image": 1, "label": 2}]),
            r"client 0: batch 0 is a dict of image, label; every item must be a pair \(x, y\)",
        ),
        (DataLoader(TensorDataset(XS), batch_size=5), "client 0: batch 0 is a list; every item must be a pair"),
        (Items([(XS[0], 1), (XS[0, :2], 1)]), "client 0 cannot be read as batches .*: .*equal size"),
        (Items([(XS[0], "cat")]), "client 0: y must hold numbers"),
        (Items([(object(), 1)]), "cannot be read as batches of numbers .* found <class 'object'>"),
        (Dataset(), "client 0 cannot be read as batches"),
        (DataLoader(TensorDataset(XS, YS), collate_fn=lambda b: (torch.ones(2, 3), torch.ones(3))), r"and y \[3\]"),
        ("/data", r"client 0 must be a pair \(x, y\), a torch Dataset or a DataLoader, not str"),
    ],
)
def test_errors_name_the_batch(source: Any, why: str) -> None:
    with pytest.raises(DataError, match=why):
        from_clients([source], test=TEST)


def test_one_dataset_is_dealt_by_a_partition() -> None:
    test = TensorDataset(XS[:5], YS[:5])
    fed = from_datasets(TensorDataset(XS, YS), test=test, partition=Shards(clients=4), seed=3)
    assert sorted(torch.cat(fed.indices).tolist()) == list(range(20))
    assert [len(set(fed.client(i)[1].tolist())) <= 2 for i in range(4)] == [True] * 4
    assert same(fed, from_datasets((XS, YS), test=test, partition=Shards(clients=4), seed=3))
    assert not same(fed, from_datasets((XS, YS), test=test, partition=Shards(clients=4), seed=4))
    assert fed.describe()["partition"] == {"kind": "shards", "clients": 4, "per_client": 2}


# --- folders


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """Two clients and a test set: cats are dark, dogs are bright, and the second client has no dog."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    root = tmp_path / "sites"
    for client, counts in {"north": {"cat": 3, "dog": 2}, "south": {"cat": 4}, "test": {"cat": 2, "dog": 2}}.items():
        for label, count in counts.items():
            (root / client / label).mkdir(parents=True)
            for i in range(count):
                pixels = np.full((5, 4, 3), 40 * (label == "dog") + i, dtype=np.uint8)
                image.fromarray(pixels).save(root / client / label / f"{i}.png")
    (root / ".hidden").mkdir()
    return root


def test_pictures(sites: Path) -> None:
    fed = from_folders(sites, pictures((3, 5, 4), mean=(0.1,) * 3, std=(0.5,) * 3))
    assert (fed.client_names, fed.class_names, fed.sizes) == (("north", "south"), ("cat", "dog"), [5, 4])
    assert fed.counts().tolist() == [[3, 2], [4, 0]]
    x, y = fed.client(0)
    assert x.shape == (5, 3, 5, 4)
    assert y.tolist() == [0, 0, 0, 1, 1]
    torch.testing.assert_close(x[4, 0, 0, 0], torch.tensor((41 / 255 - 0.1) / 0.5))
    assert len(fed.test[1]) == 4


def test_pictures_by_a_folders_name(sites: Path, tmp_path: Path) -> None:
    fed = load_data(RunConfig(data={"dataset": str(sites)}))
    assert (fed.client_names, fed.counts().tolist()) == (("north", "south"), [[3, 2], [4, 0]])
    torch.testing.assert_close(fed.client(0)[0][4, 0, 0, 0], torch.tensor(41 / 255))
    assert open_dataset(str(sites)).partition(IID(clients=9)).sizes == [1] * 9
    shown = CliRunner().invoke(app, ["data", "show", str(sites)])
    assert shown.exit_code == 0, shown.output
    assert [line.split() for line in shown.output.splitlines()][-2:] == [
        ["north", "3", "2", "5"],
        ["south", "4", "·", "4"],
    ]
    before = own_digest(str(sites))
    (sites / "north" / "cat" / "0.png").unlink()
    assert own_digest(str(sites)) != before
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no pictures as CLIENT/CLASS/FILE"):
        open_dataset(str(tmp_path / "empty"))


def test_texts_with_declared_classes(tmp_path: Path) -> None:
    for folder, text in (
        ("a/good", "fine fine"),
        ("a/bad", "poor"),
        ("b/bad", "poor poor poor"),
        ("held/good", "fine"),
    ):
        (tmp_path / "all" / folder).mkdir(parents=True)
        (tmp_path / "all" / folder / "1.txt").write_text(text)

    def read(paths: Sequence[Path]) -> torch.Tensor:
        return torch.tensor([[p.read_text().count("fine"), p.read_text().count("poor")] for p in paths])

    root, how = tmp_path / "all", {"test": tmp_path / "all" / "held", "tokens": True}
    found = from_folders(root, read, **how)  # type: ignore[arg-type]
    assert found.client(0)[0].tolist() == [[0, 1], [2, 0]]  # bad before good
    assert found.client(1)[1].tolist() == [0]
    assert found.test[1].tolist() == [1]
    told = from_folders(root, read, **how, classes=["good", "fair", "bad"])  # type: ignore[arg-type]
    assert (told.classes, told.client(1)[1].tolist(), told.test[1].tolist()) == (3, [2], [0])
    with pytest.raises(DataError, match="'bad' is none of the classes good, fair"):
        from_folders(root, read, **how, classes=["good", "fair"])  # type: ignore[arg-type]
    assert told.classes_declared
    with pytest.raises(ConfigError, match="needs the classes to be declared"):
        ntkfl.train(ntkfl.models.mlp(2, 2), found, METHODS["private-sums"](), rounds=1)


def test_folders_that_cannot_be_used(sites: Path, tmp_path: Path) -> None:
    read = pictures((3, 5, 4))
    with pytest.raises(DataError, match="no test set"):
        from_folders(sites, read, test=tmp_path / "none")
    with pytest.raises(DataError, match=r"5×4 pixels .*9×9 are asked for: .*resize the files"):
        from_folders(sites, pictures((3, 9, 9)))
    with pytest.raises(DataError, match="5 files were read to 1 inputs"):
        from_folders(sites, lambda paths: np.zeros((1, 2)))
    (sites / "north" / "cat" / "notes.txt").write_text("?")
    with pytest.raises(DataError, match=r"notes.txt is not a supported picture"):
        from_folders(sites, read)
    (sites / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="empty holds no files"):
        from_folders(sites, lambda paths: np.zeros((len(paths), 2)))
    (tmp_path / "flat" / "test").mkdir(parents=True)
    with pytest.raises(DataError, match="no folder of a client"):
        from_folders(tmp_path / "flat", read)
