"""SCAFFOLD: its control variates, and where it ends up on losses that disagree."""

from __future__ import annotations

import pytest
import torch

from ntkfl.methods import FedAvg, Scaffold
from tests.methods.rounds import one_weight, play, play_rounds, scalar_client, small_clients, small_task

OPTIONS = {"lr": 0.3, "local_steps": 5, "batch_size": 8}


@pytest.mark.parametrize("cohorts", [[(0, 1, 2, 3)] * 3, [(0, 1), (2,), (1, 2, 3), (0, 3)]])
def test_control_is_the_mean_of_all_clients(cohorts: list[tuple[int, ...]]) -> None:
    task, clients = small_task(total_clients=4), small_clients(10, 25, 7, 12)
    method = Scaffold(**OPTIONS)
    state = method.start(task, task.like)
    for number, cohort in enumerate(cohorts, 1):
        state = play(method, task, [clients[i] for i in cohort], state, number)[0].state
        own = torch.stack([c.memory.get("control", torch.zeros_like(task.like)) for c in clients])
        torch.testing.assert_close(state["control"], own.mean(0), atol=1e-12, rtol=0)
        assert float(state["control"].norm()) > 1e-3


def test_two_rounds_by_hand() -> None:
    w, c, lr, steps, server_lr = 2.0, 0.0, 0.05, 3, 0.8
    data = ((1.0, 0.0), (3.0, 6.0))
    clients = [scalar_client(i, *sample) for i, sample in enumerate(data)]
    own = [0.0, 0.0]
    task = one_weight(w, total_clients=5)
    method = Scaffold(loss="mse", lr=lr, local_steps=steps, server_lr=server_lr)
    state = method.start(task, task.like)
    for number in (1, 2):
        ends, changes = [], []
        for i, (x, y) in enumerate(data):
            v = w
            for _ in range(steps):
                v = v - lr * (x * (x * v - y) - own[i] + c)
            new = own[i] - c + (w - v) / (steps * lr)
            ends.append(v)
            changes.append(new - own[i])
            own[i] = new
        w, c = w + server_lr * (sum(ends) / 2 - w), c + 2 / 5 * sum(changes) / 2
        state = play(method, task, clients, state, number)[0].state
        assert float(state["weights"]) == pytest.approx(w, abs=1e-12)
        assert float(state["control"]) == pytest.approx(c, abs=1e-12)


def test_it_finds_the_optimum_that_fedavg_misses() -> None:
    """½w² and ½(3w − 6)²: together least at 1.8; the clients' own optima, 0 and 2, have their mean at 1."""
    clients = [scalar_client(0, 1, 0), scalar_client(1, 3, 6)]
    options = {"loss": "mse", "lr": 0.1, "local_steps": 10}
    avg = play_rounds(FedAvg(**options), one_weight(0.5), clients, rounds=30)
    scaffold = play_rounds(Scaffold(**options), one_weight(0.5, total_clients=2), clients, rounds=60)
    assert float(scaffold["weights"]) == pytest.approx(1.8, abs=1e-6)
    assert abs(float(avg["weights"]) - 1.8) > 0.5
