"""FedAdam: the server's Adam against PyTorch's, and the paper's own by hand."""

from __future__ import annotations

import pytest
import torch

from ntkfl.errors import NumericalError
from ntkfl.methods import FedAdam, FedAvg
from tests.methods.rounds import ask, one_weight, play, scalar_client, small_clients, small_task

LOCAL = {"lr": 0.3, "local_steps": 5, "batch_size": 8}


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_server_step_is_adam_on_the_averaged_update(weighting: str) -> None:
    task, clients = small_task(), small_clients(10, 25, 7)
    method = FedAdam(server_lr=0.05, beta1=0.8, tau=1e-2, bias_correction=True, weighting=weighting, **LOCAL)
    state = method.start(task, task.like)
    w = torch.nn.Parameter(task.like.clone())
    adam = torch.optim.Adam([w], lr=0.05, betas=(0.8, 0.99), eps=1e-2)
    for number in range(1, 7):
        avg = FedAvg(weighting=weighting, **LOCAL)
        averaged = play(avg, task, clients, {"weights": w.detach().clone()}, number)[0].state["weights"]
        w.grad = w.detach() - averaged
        adam.step()
        state = play(method, task, clients, state, number)[0].state
        torch.testing.assert_close(state["weights"], w.detach(), atol=1e-12, rtol=0)


def test_the_papers_two_rounds_by_hand() -> None:
    w, m, v = 2.0, 0.0, 1e-6
    method = FedAdam(loss="mse", lr=0.1, local_steps=1)
    assert not method.bias_correction
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
