"""Training on pooled samples: descent on all of them, counted and checked as uploads."""

from __future__ import annotations

import torch

from ntkfl.methods import Centralized
from tests.methods.rounds import gradient, play, play_rounds, small_clients, small_task


def test_pooled_training_is_descent_on_all_samples() -> None:
    task, clients = small_task(), small_clients(3, 8, 14)
    x, y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
    w = task.like
    for _ in range(6):
        w = w - 0.3 * gradient(task, w, x, y)
    state = play_rounds(Centralized(lr=0.3, local_steps=3), task, clients, rounds=2)
    torch.testing.assert_close(state["weights"], w, atol=1e-12, rtol=0)
    batches = play_rounds(Centralized(lr=0.3, local_steps=3, batch_size=5), task, clients, rounds=2)
    assert not torch.allclose(batches["weights"], w)


def test_pooled_samples_are_counted() -> None:
    task, clients = small_task(dtype=torch.float32), small_clients(30, 80, dtype=torch.float32)
    for number in (1, 2):
        _, log = play(Centralized(), task, clients, number=number)
        for client, sent in zip(clients, [s for s in log if s.way == "up"], strict=True):
            assert sent.kind == "rows"
            exact = len(client) * (5 * 4 + 1)
            assert exact < sent.size < exact + 64
        assert all(s.size < 64 for s in log if s.way == "down")
