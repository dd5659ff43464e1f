"""dp-fedavg: clipped changes of whole clients, noise for a client's ε, and the mean of federated averaging without."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from ntkfl.errors import ConfigError
from ntkfl.methods import ClientRound, DPFedAvg, FedAvg, Task
from ntkfl.methods.sums.noisy_sums import guarantees, promises
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.sum_accounting import Participation, budget
from ntkfl.privacy.sum_noise import GRAINS, integer_change
from tests.methods.private import assert_variance, integers, noise, private_task
from tests.methods.rounds import play, small_clients


def change(method: DPFedAvg, task: Task, client: ClientRound) -> Tensor:
    arrays = integers(method, task, client)
    assert set(arrays) == {"change"}  # no loss, no number of samples
    return arrays["change"]


def test_a_client_changes_the_sum_by_no_more_than_the_noise_is_for() -> None:
    """However far it trains, diverged training among it."""
    lengths = list[float]()
    for client in small_clients(1, 40):
        for lr in (1e-3, 1.0, 1e8):
            method = DPFedAvg(clip=0.1, lr=lr, local_steps=5)
            task = private_task(method, epsilon=None)
            lengths.append(float(change(method, task, client).norm()))
    assert 0.99 * GRAINS < max(lengths) <= integer_change([task.like.numel()])
    broken = ClientRound(0, torch.full((2, 5), math.inf).double(), torch.tensor([0, 1]), Randomness.simulated(0))
    assert float(change(DPFedAvg(), task, broken).norm()) == 0


def test_without_noise_and_clipping_it_is_federated_averaging() -> None:
    options, clients = {"lr": 0.2, "local_steps": 4}, small_clients(12, 9, 30)
    method = DPFedAvg(clip=100.0, server_lr=1.0, momentum=0.0, **options)
    task = private_task(method, epsilon=None)
    private, _ = play(method, task, clients)
    plain, _ = play(FedAvg(**options), task, clients)
    assert float((private.state["weights"] - plain.state["weights"]).abs().max()) < 100 / GRAINS
    assert private.train_loss is None


def test_the_servers_momentum_and_step() -> None:
    method = DPFedAvg(clip=1.0, lr=0.05, local_steps=2, server_lr=0.5, momentum=0.9)
    task, clients = private_task(method, epsilon=None), small_clients(12, 9)
    start = task.like
    first, _ = play(method, task, clients)
    second, _ = play(method, task, clients, first.state, 2)
    step = 2 * (first.state["weights"] - start)
    task.like = first.state["weights"]  # what `integers` asks about
    mean = sum(change(method, task, client) for client in clients) / (2 * GRAINS)
    expected = first.state["weights"] + 0.5 * (0.9 * step + mean)
    assert float((second.state["weights"] - expected).abs().max()) < 1e-9


def test_noise_is_as_wide_as_a_clients_epsilon_asks_for() -> None:
    method, (client,) = DPFedAvg(local_steps=2), small_clients(20)
    loud = private_task(method, epsilon=2.0, delta=1e-6, budget_rounds=5, noise_clients=3)
    drawn = noise(method, loud, private_task(method, epsilon=None), client)["change"]
    assert_variance(drawn, integer_change([loud.like.numel()]) ** 2 / (2 * budget(2.0, 1e-6) / 5 * 3))


def test_what_it_says_and_refuses() -> None:
    method = DPFedAvg()
    task = private_task(method, secure_sum=True, budget_rounds=2, noise_clients=2)
    (told,) = guarantees(method, task, Participation(times=2, cohort=2, clients=2, rounds=2, simulated=True))
    assert (told.unit, told.epsilon) == ("client", pytest.approx(3.0, rel=1e-3))
    assert any("took part is no secret" in line for line in told.assumptions)
    assert "for a client over 2 rounds" in promises(method, task, 2, 2)[0]
    batchnorm = Task(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double(), 3, "ce")
    with pytest.raises(ConfigError, match="batch normalisation"):
        play(method, private_task(method, batchnorm), small_clients(8, 8))
