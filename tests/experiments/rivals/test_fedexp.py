"""FedExP: its step by hand, what its paper proves of it, and what is evaluated."""

from __future__ import annotations

import pytest
import torch
from ntkfl_experiments.rivals.fedexp import FedExP
from torch import nn

from ntkfl.federation.server import ServerState
from ntkfl.methods import ClientRound, FedAvg, Task
from ntkfl.privacy.randomness import Randomness
from tests.methods.rounds import one_weight, play, scalar_client, small_clients, small_task

PLAIN = {"loss": "mse"}


def linear_task(w: list[float]) -> Task:
    model = nn.Linear(len(w), 1, bias=False).double()
    model.weight.data = torch.tensor([w], dtype=torch.float64)
    return Task(model, 1, "mse")


def one_sample(id: int, x: list[float], y: float) -> ClientRound:
    values = torch.tensor([x], dtype=torch.float64), torch.tensor([[y]], dtype=torch.float64)
    return ClientRound(id, *values, Randomness.simulated(id))


def test_two_rounds_by_hand() -> None:
    w, lr, epsilon = 2.0, 0.1, 0.002
    task, clients = one_weight(w), [scalar_client(0, 1, 0), scalar_client(1, 3, 6.9)]
    method = FedExP(lr=lr, local_steps=1, epsilon=epsilon, **PLAIN)
    state, steps = method.start(task, task.like), []
    for number in (1, 2):
        own = [-lr * w, -lr * 3 * (3 * w - 6.9)]
        mean = sum(own) / 2
        steps.append(max(1, sum(d * d for d in own) / (2 * 2 * (mean**2 + epsilon))))
        before, w = w, w + steps[-1] * mean
        outcome, _ = play(method, task, clients, state, number)
        state = outcome.state
        assert float(state["weights"]) == pytest.approx(w, abs=1e-12)
        assert outcome.diagnostics["server_step"] == pytest.approx(steps[-1])
        assert float(outcome.reported) == pytest.approx(w if number == 1 else (before + w) / 2, abs=1e-12)
    assert max(steps) > 1


def test_it_is_never_further_from_a_solution_of_all_clients_and_sooner_there_than_fedavg() -> None:
    """Where weights exist that suit every client (overparameterised least squares), as the paper's theory has it."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(6, 20, generator=generator, dtype=torch.float64)
    y = torch.randn(6, generator=generator, dtype=torch.float64)
    clients = [one_sample(i, X[i].tolist(), float(y[i])) for i in range(6)]
    solution = X.T @ torch.linalg.solve(X @ X.T, y)  # of all, the nearest to where training begins, at zero
    far = {}
    for kind in (FedAvg, FedExP):
        method, task = kind(lr=0.05, local_steps=3, **PLAIN), linear_task([0.0] * 20)
        state, lengths = method.start(task, task.like), []
        for number in range(1, 11):
            state = play(method, task, clients, state, number)[0].state
            lengths.append(float((state["weights"] - solution).norm()))
        assert lengths == sorted(lengths, reverse=True)
        far[kind] = lengths[-1]
    assert far[FedExP] < 0.7 * far[FedAvg]


def test_what_is_evaluated_and_saved_are_the_last_two_iterates() -> None:
    task, clients = small_task(), small_clients(10, 25, 7)
    method = FedExP(lr=0.3, local_steps=5)
    server, iterates = ServerState(task, method), []
    for number in (1, 2, 3):
        server.advance(play(method, task, clients, server.state, number)[0])
        iterates.append(server.state["weights"])
    torch.testing.assert_close(server.average.value, (iterates[1] + iterates[2]) / 2)
    again = ServerState(task, method)
    again.restore(server.checkpoint())
    assert torch.equal(again.average.value, server.average.value)
