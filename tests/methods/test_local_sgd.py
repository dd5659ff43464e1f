"""Batched local training against a client at a time, and against descent written out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ntkfl.methods.local_sgd import train_locally
from ntkfl.methods.stateful_sgd import batch_order, train_in_training_mode
from ntkfl.privacy.randomness import Randomness
from tests.methods.rounds import gradient, small_clients, small_task

SETTINGS = [
    pytest.param((12, 12, 12), 4, 100, id="equal clients, full batch"),
    pytest.param((3, 12, 7), 4, 100, id="unequal clients, full batch"),
    pytest.param((20, 9, 31), 7, 4, id="batches, several epochs"),
    pytest.param((20, 3, 31), 7, 8, id="one client smaller than a batch"),
    pytest.param((20, 3, 31), (1, 7, 4), 8, id="unequal steps"),
    pytest.param((5, 5), (0, 3), 100, id="no step at all"),
    pytest.param((1,), 3, 8, id="one client of one sample"),
]


@pytest.mark.parametrize("loss", ["ce", "mse"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize(("sizes", "steps", "batch"), SETTINGS)
def test_batched_equals_one_at_a_time(
    sizes: Sequence[int], steps: int | Sequence[int], batch: int, dtype: torch.dtype, tolerance: float, loss: str
) -> None:
    task, clients = small_task(loss, dtype), small_clients(*sizes, dtype=dtype)
    pull = torch.linspace(-1, 1, len(sizes), dtype=dtype).unsqueeze(1)  # a different adjustment for each client
    for adjust in (None, lambda g, w: g + pull + 0.1 * (w - task.like)):
        together = train_locally(task, task.like, clients, steps, 0.3, batch, adjust)
        counts = [steps] * len(clients) if isinstance(steps, int) else steps
        singly = train_in_training_mode(task, task.like, clients, counts, 0.3, batch, adjust)
        torch.testing.assert_close(together.weights, singly.weights, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(together.losses, singly.losses, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_full_batches_are_plain_descent(loss: str) -> None:
    task, clients, steps = small_task(loss), small_clients(4, 11, 6), [5, 2, 3]
    result = train_locally(task, task.like, clients, steps, 0.3, 50)
    for client, tau, w_m in zip(clients, steps, result.weights, strict=True):
        w = task.like
        for _ in range(tau):
            w = w - 0.3 * gradient(task, w, client.x, client.y)
        torch.testing.assert_close(w_m, w, atol=1e-12, rtol=0)


def test_batches_are_plain_stochastic_descent() -> None:
    task, clients, steps = small_task(), small_clients(30, 3, 17), [6, 4, 9]
    result = train_locally(task, task.like, clients, steps, 0.3, 8)
    for client, tau, w_m in zip(clients, steps, result.weights, strict=True):
        w = task.like
        for rows in batch_order(client, tau, 8):
            w = w - 0.3 * gradient(task, w, client.x[rows], client.y[rows])
        torch.testing.assert_close(w_m, w, atol=1e-12, rtol=0)


def test_a_client_that_is_done_stays_where_it_is() -> None:
    task, clients = small_task(), small_clients(20, 20)
    alone = train_locally(task, task.like, clients[:1], 2, 0.3, 8)
    beside = train_locally(task, task.like, clients, [2, 40], 0.3, 8)
    torch.testing.assert_close(beside.weights[0], alone.weights[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(beside.losses[0], alone.losses[0], atol=1e-12, rtol=0)


def test_epochs_draw_without_replacement_and_from_the_seed() -> None:
    client = small_clients(23)[0]
    order = batch_order(client, 12, 5)  # 4 batches an epoch
    for epoch in order.split(4):
        assert len(epoch.unique()) == 20
    assert not torch.equal(order[:4], order[4:8])
    assert torch.equal(order, batch_order(client, 12, 5))
    assert torch.equal(order[:7], batch_order(client, 7, 5))
    client.randomness = Randomness.simulated(1000)
    assert not torch.equal(order, batch_order(client, 12, 5))


def test_own_starts() -> None:
    task, clients = small_task(), small_clients(6, 9)
    starts = torch.stack([task.like, -task.like])
    together = train_locally(task, starts, clients, 3, 0.3, 50)
    singly = train_in_training_mode(task, starts, clients, [3, 3], 0.3, 50, None)
    torch.testing.assert_close(together.weights, singly.weights, atol=1e-12, rtol=0)
    expected = -task.like - 0.3 * gradient(task, -task.like, clients[1].x, clients[1].y)
    torch.testing.assert_close(train_locally(task, starts, clients, 1, 0.3, 50).weights[1], expected)
