"""Datasets and federations: normalisation, partitions by seed, fingerprints, hold-outs, standardising from sums."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ntkfl
from ntkfl.data import IID, ByWriter, Dataset, Dirichlet, Federated, Moments, from_clients, load
from ntkfl.data.dataset import TableRows, generator
from ntkfl.data.partitions import Indices, Partition
from ntkfl.errors import DataError, NTKFLError
from ntkfl.wire import Message

# --- datasets


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
    assert dataset.rows.x[30, 0, 0, 0] == 30


def test_clients_share_the_dataset_and_copy_nothing() -> None:
    dataset = small()
    federated = dataset.partition(Dirichlet(clients=4, alpha=0.5))
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
    federated = rest.partition(ByWriter(min_samples=1), seed=9)
    assert sum(federated.sizes) == 30
    assert federated.describe()["without"] == {"fraction": 0.25, "seed": 3}


def test_rows_taken_out_are_uniformly_random() -> None:
    hits = np.zeros(40)
    for seed in range(400):
        hits[rows_of(small().without(0.25, seed)[1])] += 1
    # Binomial(400, 1/4): mean 100, standard deviation 8.7.
    assert hits.min() > 65
    assert hits.max() < 135


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        ((), "at least one client"),
        (((0,), ()), "client 1 has no samples"),
        (((0,), (40,)), "client 1 has a row outside"),
        (((0,), (-1,)), "client 1 has a row outside"),
    ],
)
def test_a_partition_of_ones_own_is_checked(shares: tuple[tuple[int, ...], ...], why: str) -> None:
    @dataclass(frozen=True)
    class Given(Partition):
        kind = "given"

        def assign(self, labels: Indices, writers: Indices | None, rng: np.random.Generator) -> list[Indices]:
            return [np.array(share, np.int64) for share in shares]

    with pytest.raises(DataError, match=why):
        small().partition(Given())


# --- federations


def digits(seed: int = 0) -> Federated:
    return load("digits").partition(Dirichlet(clients=20, alpha=0.3), seed=seed)


def test_a_description_is_plain_and_complete() -> None:
    described = digits(seed=7).describe()
    assert json.loads(json.dumps(described)) == described
    assert described == {
        "dataset": "digits",
        "partition": {"kind": "dirichlet", "clients": 20, "alpha": 0.3},
        "seed": 7,
        "clients": 20,
        "samples": 1442,
        "test_samples": 355,
    }


def changed(tensor: torch.Tensor) -> torch.Tensor:
    other = tensor.clone()
    other.view(-1)[-1] += 1
    return other


def test_a_fingerprint_is_that_of_the_content() -> None:
    federated = digits()
    assert federated.fingerprint() == digits().fingerprint()
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


def test_printing_a_federation_prints_none_of_its_data() -> None:
    secret = 123.456
    clients = [(torch.full((2, 3), secret), torch.tensor([0, 1])), (torch.full((1, 3), secret), torch.tensor([1]))]
    fed = from_clients(clients, test=clients[0])
    assert "123.4" not in repr(fed.rows)  # an address may hold 123
    assert repr(fed) == "Federated('own': 2 clients of 1 to 2 samples, inputs [3], 2 classes, 2 test samples)"


# --- standardising from sums


def table(n: int, shift: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=draw) * torch.tensor([1e-3, 1.0, 100.0, 5.0]) + shift
    x[:, 3] = 7.0  # never varies
    return x, (x[:, 1] > shift).long()


def sites() -> Federated:
    parts = [table(n, shift, n) for n, shift in ((30, 0.0), (50, 2.0), (11, -3.0))]
    return from_clients(parts, test=table(200, 1.0, 1))


def test_moments_are_those_of_the_pooled_samples() -> None:
    fed = sites()
    pooled = torch.cat([fed.client(i)[0] for i in range(3)]).double()
    found, new = fed.moments(), fed.standardized()
    torch.testing.assert_close(found.mean, pooled.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.std[:3], pooled.std(0, correction=0)[:3], rtol=1e-6, atol=0)
    assert float(found.std[3]) == 1  # nothing to divide by
    x = torch.cat([new.client(i)[0] for i in range(3)])
    torch.testing.assert_close(x.mean(0), torch.zeros(4), rtol=0, atol=1e-5)
    torch.testing.assert_close(x[:, :3].std(0, correction=0), torch.ones(3), rtol=1e-4, atol=0)
    assert bool((x[:, 3] == 0).all())
    assert new.standardization is not None
    torch.testing.assert_close(new.test[0], new.standardization.standardize(fed.test[0]))
    assert new.fingerprint() != fed.fingerprint()
    assert new.describe()["standardized"] is True
    assert new.hold_out(1)[0].standardization is new.standardization


def test_images_are_standardised_by_channel_and_stay_bytes() -> None:
    new = load("digits").partition(IID(clients=3), seed=0).standardized()
    assert new.rows.x.dtype == torch.uint8
    x = torch.cat([new.client(i)[0] for i in range(3)])
    torch.testing.assert_close(x.mean(), torch.zeros(()), rtol=0, atol=1e-5)
    torch.testing.assert_close(x.std(correction=0), torch.ones(()), rtol=1e-5, atol=0)
    assert Moments.of(torch.randn(2, 3, 5, 5)).sums.shape == (3,)
    assert Moments.of(torch.randn(2, 7, 5)).sums.shape == (5,)
    with pytest.raises(NTKFLError, match="tokens"):
        Moments.of(torch.zeros(2, 3, dtype=torch.int64))


def test_what_it_takes_counts_in_the_first_round() -> None:
    how = {"rounds": 2, "clients_per_round": 2, "callbacks": []}
    method = ntkfl.methods.FedAvg(local_steps=2)
    plain, new = (ntkfl.train(nn.Linear(4, 2), fed, method, **how) for fed in (sites(), sites().standardized()))  # type: ignore[arg-type]
    first, second = new.history
    numbers = torch.zeros(4, dtype=torch.float64)
    arrays = {"samples": torch.zeros((), dtype=torch.float64), "sums": numbers, "squares": numbers}
    told = len(Message("sums", 0, arrays).encode())
    assert first["uplink"]["moments"] == 3 * told  # every client, whoever is asked first
    assert first["uplink_bytes"] == plain.history[0]["uplink_bytes"] + 3 * told
    assert first["downlink"]["moments"] > 3 * 2 * 8 * 4
    assert "moments" not in second["uplink"]
    # Features of sizes from 0.001 to 100: as they are, steps of one size do not suit them all.
    assert new.history[-1]["test_loss"] < plain.history[-1]["test_loss"]


@pytest.mark.parametrize(("name", "hides"), [("sum-ntk-fl", {"secure_sum": True}), ("private-sums", {"epsilon": 99.0})])
def test_settings_that_hide_clients_take_public_numbers_alone(name: str, hides: dict[str, float]) -> None:
    method, privacy = ntkfl.methods.METHODS[name](), ntkfl.methods.Privacy(**hides)
    with pytest.raises(NTKFLError, match="these settings would hide"):
        ntkfl.train(nn.Linear(4, 2), sites().standardized(), method, rounds=1, callbacks=[], privacy=privacy)
    mean, std = (0.0, 1.0, 0.0, 7.0), (1.0, 0.001, 100.0, 1.0)
    public = sites().standardized(mean=mean, std=std)
    torch.testing.assert_close(public.test[0], (sites().test[0] - torch.tensor(mean)) / torch.tensor(std))
    run = ntkfl.train(nn.Linear(4, 2), public, method, rounds=1, callbacks=[], privacy=privacy)
    assert run.standardization == public.standardization
    assert "moments" not in run.history[0]["uplink"]
    for fed, wrong in ((sites(), r"\[91, 4\]"), (load("digits").partition(IID(clients=3)), r"\[0, 1, 8, 8\]")):
        with pytest.raises(NTKFLError, match=f"inputs {wrong} .* with 2 features"):
            fed.standardized(mean=(0.0, 0.0), std=(1.0, 1.0))
