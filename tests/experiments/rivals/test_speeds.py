"""Clients of unequal speed, by FedNova and FedAvg."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ntkfl_experiments.rivals.speeds import Unequal, UnequalFedAvg, UnequalFedNova

from ntkfl.errors import ConfigError
from ntkfl.privacy.randomness import Randomness
from tests.methods.rounds import play, small_clients, small_task


@pytest.mark.parametrize("kind", [UnequalFedNova, UnequalFedAvg])
def test_clients_of_unequal_speed_against_the_formula(kind: type[Unequal]) -> None:
    """Each client's τ_m is drawn once and lies in the range; w ends where FedNova's and FedAvg's formulas say."""
    task, clients = small_task(), small_clients(10, 25, 40, 12, 30, 8)
    lr, options = 0.2, {"batch_size": 100}
    method = kind(lr=lr, local_steps=2, most_local_steps=9, **options)
    outcome, _ = play(method, task, clients)
    tau = [method.steps(client) for client in clients]
    assert min(tau) >= 2
    assert max(tau) <= 9
    assert len(set(tau)) > 2
    ends = [
        play(kind(lr=lr, local_steps=t, most_local_steps=t, **options), task, [replace(c, memory={})])[0].state[
            "weights"
        ]
        for c, t in zip(clients, tau, strict=True)
    ]
    expected = sum(ends) / len(ends)
    if kind is UnequalFedNova:
        directions = [(task.like - end) / (lr * t) for end, t in zip(ends, tau, strict=True)]
        expected = task.like - lr * (sum(tau) / len(tau)) * sum(directions) / len(directions)
    torch.testing.assert_close(outcome.state["weights"], expected, atol=1e-12, rtol=0)
    again = [replace(c, randomness=Randomness.simulated(99)) for c in clients]  # another round's randomness
    assert [method.steps(client) for client in again] == tau


def test_speeds_are_spread_evenly_and_follow_the_seed() -> None:
    method = UnequalFedAvg(local_steps=1, most_local_steps=4)
    clients = [replace(c, randomness=Randomness.simulated(7, i)) for i, c in enumerate(small_clients(*[2] * 400))]
    tau = [method.steps(client) for client in clients]
    for t in range(1, 5):  # a binomial count of 400 at 1/4: five standard deviations
        assert abs(tau.count(t) - 100) < 5 * (400 * 0.25 * 0.75) ** 0.5
    fresh = [replace(c, memory={}) for c in clients]
    assert [method.steps(client) for client in fresh] == tau
    for wrong in ({"most_local_steps": 3}, {"most_local_steps": 30, "local_epochs": 1}):
        with pytest.raises(ConfigError, match="most_local_steps must be at least local_steps"):
            UnequalFedAvg(**wrong)
