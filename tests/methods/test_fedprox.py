"""FedProx: FedAvg without its pull, and the pull by hand."""

from __future__ import annotations

import pytest
import torch

from ntkfl.methods import FedAvg, FedProx
from tests.methods.rounds import one_weight, play, play_rounds, scalar_client, small_clients, small_task


def test_no_pull_is_fedavg() -> None:
    task, clients = small_task(), small_clients(10, 25)
    options = {"lr": 0.3, "local_steps": 5, "batch_size": 8}
    prox, avg = (play_rounds(m, task, clients, 3) for m in (FedProx(mu=0, **options), FedAvg(**options)))
    assert torch.equal(prox["weights"], avg["weights"])


def test_three_steps_by_hand() -> None:
    w, lr, mu = 2.0, 0.1, 0.7
    ends = []
    for x, y in ((1.0, 0.0), (3.0, 3.0)):
        v = w
        for _ in range(3):
            v = v - lr * (x * (x * v - y) + mu * (v - w))
        ends.append(v)
    clients = [scalar_client(0, 1, 0), scalar_client(1, 3, 3)]
    outcome, _ = play(FedProx(loss="mse", lr=lr, mu=mu, local_steps=3), one_weight(w), clients)
    assert float(outcome.state["weights"]) == pytest.approx(sum(ends) / 2, abs=1e-12)
