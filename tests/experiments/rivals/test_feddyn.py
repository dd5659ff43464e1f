"""FedDyn: its memories, and where it ends up on losses that disagree."""

from __future__ import annotations

import pytest
import torch
from ntkfl_experiments.rivals.feddyn import FedDyn

from ntkfl.methods import FedAvg
from tests.methods.rounds import gradient, one_weight, play, play_rounds, scalar_client, small_clients, small_task

OPTIONS = {"lr": 0.3, "local_steps": 5, "batch_size": 8}


def test_two_rounds_by_hand() -> None:
    w, h, alpha, lr, steps = 2.0, 0.0, 0.3, 0.05, 3
    data, own = ((1.0, 0.0), (3.0, 6.0)), [0.0, 0.0]
    clients = [scalar_client(i, *sample) for i, sample in enumerate(data)]
    task = one_weight(w, total_clients=5)
    method = FedDyn(loss="mse", lr=lr, local_steps=steps, alpha=alpha)
    state = method.start(task, task.like)
    for number in (1, 2):
        ends = []
        for i, (x, y) in enumerate(data):
            v = w
            for _ in range(steps):
                v = v - lr * (x * (x * v - y) - own[i] + alpha * (v - w))
            own[i] -= alpha * (v - w)
            ends.append(v)
        h -= alpha * sum(end - w for end in ends) / 5
        w = sum(ends) / 2 - h / alpha
        outcome, _ = play(method, task, clients, state, number)
        state = outcome.state
        assert float(state["weights"]) == pytest.approx(w, abs=1e-12)
        assert float(state["h"]) == pytest.approx(h, abs=1e-12)
        assert float(outcome.reported) == pytest.approx(sum(ends) / 2, abs=1e-12)


@pytest.mark.parametrize("cohorts", [[(0, 1, 2, 3)] * 3, [(0, 1), (2,), (1, 2, 3), (0, 3)]])
def test_the_servers_memory_is_the_mean_of_all_clients(cohorts: list[tuple[int, ...]]) -> None:
    task, clients = small_task(total_clients=4), small_clients(10, 25, 7, 12)
    method = FedDyn(**OPTIONS)
    state = method.start(task, task.like)
    for number, cohort in enumerate(cohorts, 1):
        state = play(method, task, [clients[i] for i in cohort], state, number)[0].state
        own = torch.stack([c.memory.get("gradient", torch.zeros_like(task.like)) for c in clients])
        torch.testing.assert_close(state["h"], own.mean(0), atol=1e-12, rtol=0)
        assert float(state["h"].norm()) > 1e-3


def test_a_client_remembers_its_own_gradient_where_it_ended() -> None:
    """Of a local problem solved to its end: the first-order condition of the paper's dynamic regulariser."""
    task, clients = small_task(total_clients=1), small_clients(12)
    method = FedDyn(lr=0.3, local_steps=100, alpha=2.0)
    outcome, _ = play(method, task, clients)
    expected = gradient(task, outcome.reported, clients[0].x, clients[0].y)
    torch.testing.assert_close(clients[0].memory["gradient"], expected, atol=1e-6, rtol=0)
    assert float(expected.norm()) > 1e-2


def test_it_finds_the_optimum_that_fedavg_misses() -> None:
    """½w² and ½(3w − 6)²: together least at 1.8; the clients' own optima, 0 and 2, have their mean at 1."""
    clients = [scalar_client(0, 1, 0), scalar_client(1, 3, 6)]
    options = {"loss": "mse", "lr": 0.1, "local_steps": 8}
    avg = play_rounds(FedAvg(**options), one_weight(0.5), clients, rounds=40)
    dyn = play_rounds(FedDyn(alpha=1.0, **options), one_weight(0.5, total_clients=2), clients, rounds=40)
    assert float(dyn["weights"]) == pytest.approx(1.8, abs=1e-6)
    assert abs(float(avg["weights"]) - 1.8) > 0.5
