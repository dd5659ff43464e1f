"""FedAvg: one step of equal clients is a central step; its bytes and bits."""

from __future__ import annotations

import pytest
import torch

import ntkfl.models
from ntkfl.methods import Centralized, ClientRound, FedAvg, Task
from ntkfl.privacy.randomness import Randomness
from tests.methods.rounds import gradient, play, small_clients, small_task


@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_one_full_step_of_equal_clients_is_one_central_step(loss: str) -> None:
    task, clients = small_task(loss), small_clients(9, 9, 9)
    x, y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
    expected = task.like - 0.3 * gradient(task, task.like, x, y)
    federated, _ = play(FedAvg(loss=loss, lr=0.3, local_steps=1, batch_size=9, robust="mean"), task, clients)
    pooled, _ = play(Centralized(loss=loss, lr=0.3, local_steps=1), task, clients)
    torch.testing.assert_close(federated.state["weights"], expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(pooled.state["weights"], expected, atol=1e-12, rtol=0)
    at_start = task.losses(task.predict(task.like, x), y).mean()
    assert federated.train_loss == pytest.approx(float(at_start), rel=1e-6)
    assert pooled.train_loss == pytest.approx(float(at_start), rel=1e-6)


def test_upload_of_the_papers_network() -> None:
    model = ntkfl.models.mlp(784, 100, 10)
    task = Task(model, 10, "ce")
    clients = [ClientRound(i, torch.randn(4, 784), torch.arange(4), Randomness.simulated(i)) for i in range(2)]
    _, log = play(FedAvg(local_steps=1), task, clients)
    ups, downs = ([s for s in log if s.way == way] for way in ("up", "down"))
    assert [s.kind for s in ups] == ["update"] * 2
    assert [s.kind for s in downs] == ["weights"] * 2
    for sent in log:
        assert 79_510 * 4 < sent.size < 79_510 * 4 + 128


def test_bits_follow_from_seeds() -> None:
    method, task = FedAvg(lr=0.3, local_steps=3, batch_size=4), small_task(dtype=torch.float32)
    clients = small_clients(20, 30, dtype=torch.float32)
    first, again = (play(method, task, clients)[0].state["weights"] for _ in range(2))
    assert torch.equal(first, again)
    clients[1].randomness = Randomness.simulated(1000)
    assert not torch.equal(first, play(method, task, clients)[0].state["weights"])
