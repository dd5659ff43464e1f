"""What every method must do, whatever its paper: train, on classes and real targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ntkfl.methods import ClientRound, Method, Task
from ntkfl.methods.base import adds_noise, privacy_of
from ntkfl.privacy.settings import Privacy
from tests.methods.known import METHODS
from tests.methods.rounds import DIMENSIONS, play, small_clients, small_task

OPTIONS: dict[str, dict[str, object]] = {
    "fedadam": {"server_lr": 0.05},
    "private-sums": {"clip": 1.0, "lr": 0.3},
}
VARIANTS: list[tuple[str, dict[str, object], dict[str, Any]]] = [
    *((name, {}, {}) for name in METHODS),
    ("fednova", {"local_epochs": 2, "batch_size": 5}, {}),
    ("ntk-fl", {"form": "dense"}, {}),
    ("ntk-fl", {}, {"sparsity": 0.5, "values": "8bit"}),
    ("sum-ntk-fl", {"values": "float32", "largest": 4}, {}),
    ("sum-ridge", {"keep_shares": True}, {}),
]
IDS = [" ".join([name, *map(str, options | privacy)]) for name, options, privacy in VARIANTS]
every_method = pytest.mark.parametrize(("name", "options", "privacy"), VARIANTS, ids=IDS)


def build(name: str, options: dict[str, object], **more: object) -> Method:
    steps = {"local_steps": 8} if "local_steps" in METHODS[name].model_fields else {}
    return METHODS[name](**(steps | OPTIONS.get(name, {}) | options | more))


def settled(method: Method, privacy: dict[str, Any]) -> Privacy:
    """The method's own settings, but for noise, which is tested beside the methods that add it, and projection."""
    return privacy_of(method, Privacy(epsilon=None, budget_rounds=3, projected_dim=None, **privacy))


def shared(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    (client,) = small_clients(9, dtype=dtype, seed=5)
    return client.x, client.y


def mean_loss(task: Task, w: Tensor, clients: list[ClientRound]) -> float:
    return float(torch.stack([task.losses(task.predict(w, c.x), c.y).mean() for c in clients]).mean())


@every_method
@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_three_rounds_train(name: str, options: dict[str, object], privacy: dict[str, Any], loss: str) -> None:
    method = build(name, options, loss=loss)
    how = {"shared": shared(torch.float32), "total_clients": 3, "privacy": settled(method, privacy)}
    task, clients = small_task(loss, torch.float32, **how), small_clients(30, 12, 21, dtype=torch.float32)
    state = method.start(task, task.like)
    losses = [mean_loss(task, task.like, clients)]
    for number in (1, 2, 3):
        outcome, log = play(method, task, clients, state, number)
        state = outcome.state
        losses.append(mean_loss(task, state["weights"], clients))
        assert state["weights"].dtype == torch.float32
        if adds_noise(method):
            assert outcome.train_loss is None  # a loss would cost privacy of its own
        else:
            assert 0 < outcome.train_loss < 1.5 * losses[0]
        assert {s.client for s in log if s.way == "up"} == {0, 1, 2}
    assert losses[-1] < 0.99 * losses[0]


@every_method
def test_real_targets(name: str, options: dict[str, object], privacy: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    clients = small_clients(30, 12)
    for client in clients:
        client.y = torch.randn(len(client), DIMENSIONS[1], generator=generator, dtype=torch.float64)
    method = build(name, options, loss="mse")
    given = (clients[0].x[:4], clients[0].y[:4])
    task = small_task("mse", shared=given, total_clients=2, privacy=settled(method, privacy))
    task.example = task.example[0], clients[0].y[:1]
    outcome, _ = play(method, task, clients)
    assert mean_loss(task, outcome.state["weights"], clients) < mean_loss(task, task.like, clients)
