"""Models that behave otherwise in training: batch normalisation and dropout in local training, and what is averaged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ntkfl
from ntkfl.errors import ModelError
from ntkfl.methods import METHODS, NTKFL, ClientRound, Task
from ntkfl.methods.batchnorm import NAME, advice, flat_statistics, load_statistics, start, statistics
from ntkfl.methods.local_sgd import train_locally
from ntkfl.privacy.randomness import Randomness


def normalised() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return model.double()


def client(id: int = 0, n: int = 20, seed: int = 0) -> ClientRound:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=g, dtype=torch.float64) + id
    return ClientRound(id, x, torch.randint(0, 3, (n,), generator=g), Randomness.simulated(seed))


def test_one_client_trains_as_plain_pytorch_does() -> None:
    model, own = normalised(), client()
    task = Task(model, 3, "ce")
    result = train_locally(task, task.like, [own], 7, 0.1, 100)
    reference = copy.deepcopy(model).train()
    optimiser = torch.optim.SGD(reference.parameters(), lr=0.1)
    for rows in [torch.randperm(20, generator=torch.Generator().manual_seed(0)) for _ in range(1)] * 7:
        optimiser.zero_grad()
        nn.functional.cross_entropy(reference(own.x[rows]), own.y[rows]).backward()
        optimiser.step()
    expected = torch.cat([p.detach().flatten() for p in reference.parameters()])
    assert (result.weights[0] - expected).abs().max() < 1e-12
    assert own.statistics is not None
    assert (own.statistics - flat_statistics(reference)).abs().max() < 1e-12
    assert torch.equal(flat_statistics(task.model), flat_statistics(model))  # the task's own are as they were


def test_ntk_fl_leaves_them_as_broadcast() -> None:
    task = Task(normalised(), 3, "ce")
    assert NAME not in start(NTKFL(), task, task.like)
    model = normalised()
    load_statistics(model, flat_statistics(model) * 0 + torch.rand(16, dtype=torch.float64) + 0.5)
    fed = ntkfl.data.from_clients([(torch.randn(20, 5), torch.randint(0, 3, (20,))) for _ in range(3)],
                                  test=(torch.randn(9, 5), torch.arange(9) % 3))  # fmt: skip
    with pytest.warns(UserWarning, match=r"ntk-fl trains weights alone.* use nn\.GroupNorm"):
        run = ntkfl.train(model, fed, NTKFL(), rounds=2, clients_per_round=3)
    assert torch.equal(flat_statistics(run.model), flat_statistics(model))


@pytest.mark.parametrize("name", METHODS)
def test_who_trains_weights_alone_is_warned(name: str) -> None:
    method = METHODS[name]() if name != "private-sums" else METHODS[name](noise_clients=2, epsilon=1.0)
    with_norm = advice(method, Task(normalised(), 3, "ce"))
    assert len(with_norm) == (0 if method.trains_locally else 1)
    assert advice(method, Task(nn.Linear(5, 3), 3, "ce")) == []
    kept = normalised()
    kept[1].statistics_stay = True  # as of a pretrained backbone
    assert advice(method, Task(kept, 3, "ce")) == []


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "fednova", "fedadam", "qsgd", "centralized"])
def test_every_averaging_method_trains_batch_normalisation(name: str, tmp_path: Any) -> None:
    """Its statistics move towards the data's, in the model that is reported, and survive a checkpoint."""
    torch.manual_seed(0)
    centres = 3 * torch.randn(3, 5)
    clients = []
    for _ in range(4):
        y = torch.randint(0, 3, (40,))
        clients.append((4 + centres[y] + torch.randn(40, 5), y))
    y = torch.arange(60) % 3
    fed = ntkfl.data.from_clients(clients, test=(4 + centres[y] + torch.randn(60, 5), y))
    method = METHODS[name](local_steps=10, **({"server_lr": 0.05} if name == "fedadam" else {}))
    model = normalised().float()
    options: dict[str, Any] = {"clients_per_round": 2, "seed": 0}
    whole = ntkfl.train(model, fed, method, rounds=6, out=tmp_path / "whole", **options)
    assert whole.history[-1]["test_accuracy"] > 0.8
    moved = (flat_statistics(whole.model) - flat_statistics(model)).abs().max()
    assert moved > 0.1
    with torch.no_grad():
        right = (whole.model.eval()(fed.test[0]).argmax(1) == fed.test[1]).double().mean()
    assert float(right) == whole.history[-1]["test_accuracy"]
    ntkfl.train(model, fed, method, rounds=3, out=tmp_path / "parts", **options)
    ntkfl.train(model, fed, method, rounds=6, out=tmp_path / "parts", resume=True, **options)
    for file in ("history.jsonl", "model.safetensors"):
        assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_dropout_is_on_in_local_training_and_repeats() -> None:
    model = nn.Sequential(nn.Linear(5, 50), nn.Dropout(0.5), nn.Linear(50, 3)).double()
    task = Task(model, 3, "ce")
    a, b = (train_locally(task, task.like, [client()], 3, 0.1, 100).weights for _ in range(2))
    assert torch.equal(a, b)
    other = client()
    other.randomness = Randomness.simulated(5)
    assert not torch.equal(train_locally(task, task.like, [other], 3, 0.1, 100).weights, a)
    assert not model.training or all(m.training for m in model.modules())
    assert statistics(model) == {}


def test_a_client_with_one_sample_cannot_normalise() -> None:
    task = Task(normalised(), 3, "ce")
    with pytest.raises(ModelError, match="use group norm"):
        train_locally(task, task.like, [client(n=1)], 1, 0.1, 100)
