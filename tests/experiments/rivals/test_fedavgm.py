"""FedAvgM: the server's momentum against PyTorch's, and FedAvg without it."""

from __future__ import annotations

import pytest
import torch
from ntkfl_experiments.rivals.fedavgm import FedAvgM

from ntkfl.methods import FedAvg
from tests.methods.rounds import play, play_rounds, small_clients, small_task

LOCAL = {"lr": 0.3, "local_steps": 5, "batch_size": 8}


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_server_step_is_momentum_on_the_averaged_update(weighting: str) -> None:
    task, clients = small_task(), small_clients(10, 25, 7)
    method = FedAvgM(momentum=0.7, server_lr=0.6, weighting=weighting, **LOCAL)
    state = method.start(task, task.like)
    w = torch.nn.Parameter(task.like.clone())
    descent = torch.optim.SGD([w], lr=0.6, momentum=0.7)
    for number in range(1, 6):
        avg = FedAvg(weighting=weighting, **LOCAL)
        averaged = play(avg, task, clients, {"weights": w.detach().clone()}, number)[0].state["weights"]
        w.grad = w.detach() - averaged
        descent.step()
        state = play(method, task, clients, state, number)[0].state
        torch.testing.assert_close(state["weights"], w.detach(), atol=1e-12, rtol=0)


def test_without_momentum_it_is_fedavg() -> None:
    task, clients = small_task(), small_clients(10, 25, 7)
    plain = play_rounds(FedAvg(**LOCAL), task, clients, rounds=3)
    none = play_rounds(FedAvgM(momentum=0, **LOCAL), task, clients, rounds=3)
    torch.testing.assert_close(none["weights"], plain["weights"], atol=1e-12, rtol=0)
