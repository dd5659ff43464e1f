"""FedAdam: the paper's step by hand, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from ntkfl.errors import NumericalError
from ntkfl.methods import FedAdam
from tests.methods.rounds import ask, one_weight, play, scalar_client, small_clients, small_task


def test_the_papers_two_rounds_by_hand() -> None:
    w, m, v = 2.0, 0.0, 1e-6
    method = FedAdam(loss="mse", lr=0.1, local_steps=1)
    task, clients = one_weight(w), [scalar_client(0, 1, 0), scalar_client(1, 3, 6)]
    state = method.start(task, task.like)
    for number in (1, 2):
        delta = 0.1 * (w + 3 * (3 * w - 6)) / 2
        m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
        w = w - 0.01 * m / (v**0.5 + 1e-3)
        state = play(method, task, clients, state, number)[0].state
        assert float(state["weights"]) == pytest.approx(w, abs=1e-12)


def test_an_update_whose_square_overflows_is_refused() -> None:
    """It would hold the second moment at infinity, and every later step at zero, in silence."""
    task, clients = small_task(dtype=torch.float32), small_clients(3, 4, dtype=torch.float32)
    method = FedAdam()
    conversation = method.round(task, method.start(task, task.like), 1, [0, 1])
    next(conversation)
    replies = [ask(method, task, client) for client in clients]
    replies[0].arrays["weights"][0] = 1e30
    with pytest.raises(NumericalError, match="squared updates"):
        conversation.send(replies)
