"""The server's Adam against PyTorch's."""

from __future__ import annotations

import pytest
import torch
from ntkfl_experiments.rivals.server_adam import ServerAdam

from ntkfl.methods import FedAvg
from tests.methods.rounds import play, small_clients, small_task

LOCAL = {"lr": 0.3, "local_steps": 5, "batch_size": 8}


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_server_step_is_adam_on_the_averaged_update(weighting: str) -> None:
    task, clients = small_task(), small_clients(10, 25, 7)
    method = ServerAdam(server_lr=0.05, beta1=0.8, tau=1e-2, weighting=weighting, **LOCAL)
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
