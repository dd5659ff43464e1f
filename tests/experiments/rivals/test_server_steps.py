"""Steps of the server on averaged updates: FedAvgM's momentum and ServerAdam against PyTorch's optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ntkfl_experiments.rivals.fedavgm import FedAvgM
from ntkfl_experiments.rivals.server_adam import ServerAdam

from ntkfl.methods import FedAvg
from tests.methods.rounds import play, play_rounds, small_clients, small_task

LOCAL = {"lr": 0.3, "local_steps": 5, "batch_size": 8}
MOMENTUM = (FedAvgM(momentum=0.7, server_lr=0.6, **LOCAL), torch.optim.SGD, {"lr": 0.6, "momentum": 0.7})
ADAM = (
    ServerAdam(server_lr=0.05, beta1=0.8, tau=1e-2, **LOCAL),
    torch.optim.Adam,
    {"lr": 0.05, "betas": (0.8, 0.99), "eps": 1e-2},
)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize(("rival", "optimizer", "options"), [MOMENTUM, ADAM], ids=["fedavgm", "server-adam"])
def test_server_step_is_the_optimizers_on_the_averaged_update(
    rival: FedAvg, optimizer: type[torch.optim.Optimizer], options: dict[str, Any], weighting: str
) -> None:
    task, clients = small_task(), small_clients(10, 25, 7)
    method = rival.model_copy(update={"weighting": weighting})
    average = FedAvg(weighting=weighting, **LOCAL)
    state = method.start(task, task.like)
    w = torch.nn.Parameter(task.like.clone())
    expected = optimizer([w], **options)
    for number in range(1, 7):
        averaged = play(average, task, clients, {"weights": w.detach().clone()}, number)[0].state["weights"]
        w.grad = w.detach() - averaged
        expected.step()
        state = play(method, task, clients, state, number)[0].state
        torch.testing.assert_close(state["weights"], w.detach(), atol=1e-12, rtol=0)


def test_without_momentum_it_is_fedavg() -> None:
    task, clients = small_task(), small_clients(10, 25, 7)
    plain = play_rounds(FedAvg(**LOCAL), task, clients, rounds=3)
    none = play_rounds(FedAvgM(momentum=0, **LOCAL), task, clients, rounds=3)
    torch.testing.assert_close(none["weights"], plain["weights"], atol=1e-12, rtol=0)
