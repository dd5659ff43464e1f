"""dp-fedavg: clipped changes of whole clients, noise for a client's ε, and the mean of federated averaging without."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import ntkfl
from ntkfl.errors import ConfigError
from ntkfl.methods import ClientRound, DPFedAvg, FedAvg, Task
from ntkfl.methods.inspection import Participation
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.sum_accounting import budget
from ntkfl.privacy.sum_noise import GRAINS, vector_change
from ntkfl.wire import Message
from tests.methods.rounds import play, small_clients, small_task


def change(method: DPFedAvg, task: Task, client: ClientRound) -> torch.Tensor:
    (reply,) = method.answer(task, Message("weights", 1, {"weights": task.like}), [client])
    assert set(reply.arrays) == {"change"}  # no loss, no number of samples
    return reply.arrays["change"].double()


def test_a_client_changes_the_sum_by_no_more_than_the_noise_is_for() -> None:
    """However far it trains, diverged training among it."""
    task, lengths = small_task(), []
    for client in small_clients(1, 40):
        for lr in (1e-3, 1.0, 1e8):
            method = DPFedAvg(epsilon=None, clip=0.1, lr=lr, local_steps=5)
            lengths.append(float(change(method, task, client).norm()))
    assert 0.99 * GRAINS < max(lengths) <= vector_change(task.like.numel(), False)
    broken = ClientRound(0, torch.full((2, 5), math.inf).double(), torch.tensor([0, 1]), Randomness.simulated(0))
    assert float(change(DPFedAvg(epsilon=None), task, broken).norm()) == 0


def test_without_noise_and_clipping_it_is_federated_averaging() -> None:
    task, clients = small_task(), small_clients(12, 9, 30)
    options = {"lr": 0.2, "local_steps": 4}
    private, _ = play(DPFedAvg(epsilon=None, clip=100.0, server_lr=1.0, momentum=0.0, **options), task, clients)
    plain, _ = play(FedAvg(**options), task, clients)
    assert float((private.state["weights"] - plain.state["weights"]).abs().max()) < 100 / GRAINS
    assert private.train_loss is None


def test_the_servers_momentum_and_step() -> None:
    task, clients = small_task(), small_clients(12, 9)
    method = DPFedAvg(epsilon=None, clip=1.0, lr=0.05, local_steps=2, server_lr=0.5, momentum=0.9)
    first, _ = play(method, task, clients)
    second, _ = play(method, task, clients, first.state, 2)
    step = 2 * (first.state["weights"] - task.like)
    mean = sum(change(method, task_at(first.state["weights"]), c) for c in clients) / (2 * GRAINS)
    expected = first.state["weights"] + 0.5 * (0.9 * step + mean)
    assert float((second.state["weights"] - expected).abs().max()) < 1e-9


def task_at(weights: torch.Tensor) -> Task:
    task = small_task()
    task.like = weights
    return task


def test_noise_is_as_wide_as_a_clients_epsilon_asks_for() -> None:
    task = small_task()
    (client,) = small_clients(20)
    loud = DPFedAvg(epsilon=2.0, delta=1e-6, budget_rounds=5, noise_clients=3, local_steps=2)
    silent = DPFedAvg(epsilon=None, local_steps=2)
    quiet = change(silent, task, client)
    drawn = []
    for key in range(60):
        own = ClientRound(0, client.x, client.y, Randomness(bytes([key]) * 32))
        plain = change(silent, task, own)
        assert float((plain - quiet).abs().max()) <= 1  # rounding alone
        drawn.append(change(loud, task, own) - plain)
    together = torch.cat(drawn)
    expected = vector_change(task.like.numel(), False) ** 2 / (2 * budget(2.0, 1e-6) / 5 * 3)
    assert float(together.square().mean()) / expected == pytest.approx(1, abs=5 * math.sqrt(2 / len(together)))


def test_what_it_says_and_refuses() -> None:
    method = DPFedAvg(secure_sum=True, budget_rounds=2, noise_clients=2)
    run = Participation(times=2, cohort=2, clients=2, rounds=2, simulated=True)
    (told,) = method.guarantees(run)
    assert (told.unit, told.epsilon) == ("client", pytest.approx(3.0, rel=1e-3))
    assert any("took part is no secret" in line for line in told.assumptions)
    assert "for a client over 2 rounds" in method.promise(2, 2)[0]
    with pytest.raises(ConfigError, match="unit"):
        DPFedAvg(unit="record")
    task = Task(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double(), 3, "ce")
    with pytest.raises(ConfigError, match="batch normalisation"):
        play(DPFedAvg(), task, small_clients(8, 8))


def test_masked_sums_are_the_plain_ones() -> None:
    digits = ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=6), seed=0)
    model, ends = ntkfl.models.mlp(64, 16, 10), []
    for secure in (False, True):
        method = DPFedAvg(epsilon=100.0, budget_rounds=2, noise_clients=6, secure_sum=secure, local_steps=2)
        run = ntkfl.train(model, digits, method, rounds=2, seed=1, callbacks=[])
        assert (run.history[-1]["epsilon"], run.history[-1]["unit"]) == (pytest.approx(100.0), "client")
        ends.append(ntkfl.tangent.parameters.flatten(run.model))
    assert float((ends[0] - ends[1]).norm()) < 1e-3 * float(ends[0].norm())
