"""Federations: clients, counts, fingerprints, hold-outs, and a user's own arrays."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ntkfl.data import Dirichlet, Federated, from_clients, load
from ntkfl.data.seeds import generator
from ntkfl.data.table import TableRows
from ntkfl.errors import DataError


def digits(seed: int = 0) -> Federated:
    return load("digits").partition(Dirichlet(clients=20, alpha=0.3), seed=seed)


# --- what a federation says of itself


def test_counts_are_those_of_the_clients() -> None:
    federated = digits()
    counts = federated.counts()
    assert counts.shape == (20, 10)
    assert counts.sum(axis=1).tolist() == federated.sizes
    for number in (0, 19):
        _, y = federated.client(number)
        assert counts[number].tolist() == torch.bincount(y, minlength=10).tolist()


def test_a_description_is_plain_and_complete() -> None:
    described = digits(seed=7).describe()
    assert json.loads(json.dumps(described)) == described
    assert described == {
        "dataset": "digits",
        "partition": {"kind": "dirichlet", "clients": 20, "alpha": 0.3, "reading": "composition", "overlap": False},
        "seed": 7,
        "clients": 20,
        "samples": 1442,
        "test_samples": 355,
    }
    described["partition"]["alpha"] = 9.0
    assert digits(seed=7).describe()["partition"]["alpha"] == 0.3


# --- fingerprints


def changed(tensor: torch.Tensor) -> torch.Tensor:
    other = tensor.clone()
    other.view(-1)[-1] += 1
    return other


def test_a_fingerprint_is_that_of_the_content() -> None:
    federated = digits()
    assert federated.fingerprint() == digits().fingerprint()
    assert len(bytes.fromhex(federated.fingerprint())) == 32
    rows, test = federated.rows, federated.test_rows
    others = [
        digits(seed=1),
        replace(federated, rows=replace(rows, x=changed(rows.x))),
        replace(federated, rows=replace(rows, y=changed(rows.y))),
        replace(federated, rows=replace(rows, mean=(0.3,))),
        replace(federated, test_rows=replace(test, x=changed(test.x))),
        replace(federated, test_rows=replace(test, y=changed(test.y))),
        replace(federated, indices=federated.indices[::-1]),
        replace(federated, indices=federated.indices[:-1]),
        replace(federated, classes=11),
        replace(federated, rows=TableRows(*rows.take())),
    ]
    # The same rows in the same order, cut into clients elsewhere.
    first, second, *more = federated.indices
    others.append(replace(federated, indices=(first[:-1], torch.cat([first[-1:], second]), *more)))
    assert len({other.fingerprint() for other in [federated, *others]}) == len(others) + 1


# --- holding clients out


@given(st.integers(2, 30), st.data(), st.integers(0, 2**40))
@settings(max_examples=30, deadline=None)
def test_held_out_clients_are_disjoint_and_complete(clients: int, data: st.DataObject, seed: int) -> None:
    count = data.draw(st.integers(1, clients - 1))
    federated = from_clients([(np.full((1, 1), float(n)), [0]) for n in range(clients)], test=(np.zeros((1, 1)), [1]))
    training, held = federated.hold_out(count, seed)
    numbers = [[int(side.client(n)[0]) for n in range(len(side))] for side in (training, held)]
    assert len(held) == count
    assert sorted(numbers[0] + numbers[1]) == list(range(clients))
    assert numbers == [sorted(side) for side in numbers]
    again = federated.hold_out(count, seed)
    assert [side.fingerprint() for side in again] == [training.fingerprint(), held.fingerprint()]


def test_a_hold_out_is_described_and_can_be_repeated() -> None:
    training, held = digits().hold_out(5, seed=1)
    assert held.describe()["hold_out"] == [{"count": 5, "seed": 1, "part": "held-out"}]
    assert held.describe()["clients"] == 5
    validation, _ = training.hold_out(2, seed=4)
    assert [step["part"] for step in validation.describe()["hold_out"]] == ["training", "training"]
    assert digits().hold_out(5, seed=2)[1].fingerprint() != held.fingerprint()


def test_one_seed_serves_several_purposes_independently() -> None:
    draws = {purpose: generator(5, purpose).random(4).tolist() for purpose in ("partition", "hold out", "without")}
    assert len({tuple(draw) for draw in draws.values()}) == 3
    assert generator(5, "partition").random(4).tolist() == draws["partition"]
    assert generator(6, "partition").random(4).tolist() != draws["partition"]


# --- a user's own arrays

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
    x = torch.zeros(2, 3)
    y = torch.zeros(2, dtype=torch.int64)
    federated = from_clients([(x, y)], test=(x, y))
    before = federated.fingerprint()
    x += 1
    y += 1
    assert federated.client(0)[0].sum() == federated.test[0].sum() == 0
    assert replace(federated).fingerprint() == before


def with_value(value: float) -> np.ndarray:
    x = X.copy()
    x[2, 1] = value
    return x


@pytest.mark.parametrize(
    ("clients", "test", "said"),
    [
        ([], TEST, "at least one client"),
        ([(X, Y)], None, "test must be a pair"),
        ([(X, Y), (X[:0], Y[:0])], TEST, "client 1 has no samples"),
        ([(X, Y), (X[:, :2], Y)], TEST, r"client 1 has features \[2\], but client 0 has \[3\]"),
        ([(X, Y)], (X[:, :2], Y), r"test has features \[2\]"),
        ([(X, Y), (with_value(np.nan), Y)], TEST, "client 1: x has a value that is not finite"),
        ([(X, Y * np.nan)], (X, Y * 1.0), "client 0: y has a value that is not finite"),
        ([(X, Y), (X, Y[:3])], TEST, r"client 1 has 4 samples but y of shape \[3\]"),
        ([(X, Y), (X, Y - 1)], TEST, r"client 1: labels must lie in 0\.\.2, not -1\.\.1"),
        ([(X, Y), (X, Y * 0.5)], TEST, "client 1 has regression targets of width 1, but client 0 has integer labels"),
        ([(X, Y[:, None])], TEST, "client 0: labels must be one integer a sample"),
        ([(X, np.ones((4, 2, 2)))], TEST, "client 0: regression targets must be"),
        ([(X[:, 0], Y)], TEST, "client 0: x must be"),
        ([(X * 1j, Y)], TEST, "client 0: x must hold numbers, not complex128"),
        ([X], TEST, r"client 0 must be a pair \(x, y\), a torch Dataset or a DataLoader, not ndarray"),
    ],
)
def test_arrays_that_cannot_work_are_named(clients: Any, test: Any, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        from_clients(clients, test=test)
    assert "\n" not in str(caught.value)


def test_printing_a_federation_prints_none_of_its_data() -> None:
    secret = 123.456
    clients = [(torch.full((2, 3), secret), torch.tensor([0, 1])), (torch.full((1, 3), secret), torch.tensor([1]))]
    fed = from_clients(clients, test=clients[0])
    for shown in (repr(fed), repr(fed.rows), f"{fed}"):
        assert "123" not in shown
        assert "\n" not in shown
    assert repr(fed) == "Federated('own': 2 clients of 1 to 2 samples, inputs [3], 2 classes, 2 test samples)"
