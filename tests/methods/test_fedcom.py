"""FedCOM: FedAvg but for rounding."""

from __future__ import annotations

import pytest
import torch

from ntkfl.methods import FedAvg, FedCOM
from tests.methods.rounds import play, small_clients, small_task

LOCAL = {"lr": 0.3, "local_steps": 5, "batch_size": 8}


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_it_is_fedavg_but_for_rounding(weighting: str) -> None:
    task, clients = small_task(), small_clients(10, 25, 7)
    avg = play(FedAvg(weighting=weighting, **LOCAL), task, clients)[0].state["weights"]
    locals_ = [play(FedAvg(**LOCAL), task, [c])[0].state["weights"] for c in clients]
    outcome, log = play(FedCOM(weighting=weighting, **LOCAL), task, clients)
    coarsest = max(float((w - task.like).abs().max()) for w in locals_) / 127
    assert 0 < float((outcome.state["weights"] - avg).abs().max()) < coarsest
    for sent in log:
        if sent.way == "up":
            assert task.like.numel() < sent.size < task.like.numel() + 128
    double, _ = play(FedCOM(weighting=weighting, server_lr=2, **LOCAL), task, clients)
    step, step2 = (o.state["weights"] - task.like for o in (outcome, double))
    torch.testing.assert_close(step2, 2 * step, atol=1e-12, rtol=0)
