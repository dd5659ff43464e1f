"""FedAvgM: the server's momentum against PyTorch's optimizer on the averaged update."""

from __future__ import annotations

import pytest
import torch
from ntkfl_experiments.rivals.fedavgm import FedAvgM

from ntkfl.methods import FedAvg
from tests.methods.rounds import play, small_clients, small_task


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_server_step_is_the_optimizers_on_the_averaged_update(weighting: str, momentum: float) -> None:
    task, clients = small_task(), small_clients(10, 25, 7)
    local = {"lr": 0.3, "local_steps": 5, "batch_size": 8, "weighting": weighting}
    average, method = FedAvg(**local), FedAvgM(momentum=momentum, server_lr=0.6, **local)
    state = method.start(task, task.like)
    w = torch.nn.Parameter(task.like.clone())
    expected = torch.optim.SGD([w], lr=0.6, momentum=momentum)
    for number in range(1, 7):
        averaged = play(average, task, clients, {"weights": w.detach().clone()}, number)[0].state["weights"]
        w.grad = w.detach() - averaged
        expected.step()
        state = play(method, task, clients, state, number)[0].state
        torch.testing.assert_close(state["weights"], w.detach(), atol=1e-12, rtol=0)
