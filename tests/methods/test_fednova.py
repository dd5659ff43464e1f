"""FedNova: FedAvg where clients take equally many steps, the true optimum where they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ntkfl.errors import ConfigError
from ntkfl.methods import FedAvg, FedNova, FedProx
from ntkfl.methods.averaging.local_training import LocalTraining
from ntkfl.privacy.randomness import Randomness
from tests.methods.rounds import one_weight, play, play_rounds, scalar_client, small_clients, small_task


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_equal_steps_are_fedavg(weighting: str) -> None:
    task, clients = small_task(), small_clients(10, 25, 40)
    options = {"lr": 0.3, "local_steps": 5, "batch_size": 8, "weighting": weighting}
    nova, avg = (play_rounds(method(**options), task, clients, rounds=3) for method in (FedNova, FedAvg))
    torch.testing.assert_close(nova["weights"], avg["weights"], atol=1e-12, rtol=0)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_a_round_by_hand(weighting: str) -> None:
    """Client m ends at w_m = y_m + (1 − lr)^τ_m (w − y_m)."""
    w, lr = 3.0, 0.1
    clients = [scalar_client(0, 1, -1), scalar_client(1, 1, 2, n=9)]
    p = (0.5, 0.5) if weighting == "uniform" else (0.1, 0.9)
    ends = [y + (1 - lr) ** tau * (w - y) for y, tau in ((-1, 2), (2, 18))]
    mean = sum(share * (w - end) / (lr * tau) for share, end, tau in zip(p, ends, (2, 18), strict=True))
    tau_eff = 2 * p[0] + 18 * p[1]
    method = FedNova(loss="mse", lr=lr, local_epochs=2, batch_size=1, weighting=weighting)
    outcome, log = play(method, one_weight(w), clients)
    assert float(outcome.state["weights"]) == pytest.approx(w - lr * tau_eff * mean, abs=1e-12)
    assert outcome.diagnostics["effective_steps"] == pytest.approx(tau_eff)
    assert [int(s.message.take("steps")) for s in log if s.way == "up"] == [2, 18]


def test_unequal_steps_do_not_move_the_optimum() -> None:
    clients = [scalar_client(0, 1, 0), scalar_client(1, 1, 1, n=9)]
    options = {"loss": "mse", "lr": 0.02, "local_epochs": 1, "batch_size": 1}
    nova = play_rounds(FedNova(**options), one_weight(0.3), clients, rounds=60)
    avg = play_rounds(FedAvg(**options), one_weight(0.3), clients, rounds=60)
    assert float(nova["weights"]) == pytest.approx(0.5, abs=0.03)
    assert float(avg["weights"]) == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize("kind", [FedNova, FedAvg, FedProx])
def test_clients_of_unequal_speed_against_the_formula(kind: type[LocalTraining]) -> None:
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
        play(kind(lr=lr, local_steps=t, **options), task, [c])[0].state["weights"]
        for c, t in zip(clients, tau, strict=True)
    ]
    expected = sum(ends) / len(ends)
    if kind is FedNova:
        directions = [(task.like - end) / (lr * t) for end, t in zip(ends, tau, strict=True)]
        expected = task.like - lr * (sum(tau) / len(tau)) * sum(directions) / len(directions)
    torch.testing.assert_close(outcome.state["weights"], expected, atol=1e-12, rtol=0)
    again = [replace(c, randomness=Randomness.simulated(99)) for c in clients]  # another round's randomness
    assert [method.steps(client) for client in again] == tau


def test_speeds_are_spread_evenly_and_follow_the_seed() -> None:
    method = FedAvg(local_steps=1, most_local_steps=4)
    clients = [replace(c, randomness=Randomness.simulated(7, i)) for i, c in enumerate(small_clients(*[2] * 400))]
    tau = [method.steps(client) for client in clients]
    for t in range(1, 5):  # a binomial count of 400 at 1/4: five standard deviations
        assert abs(tau.count(t) - 100) < 5 * (400 * 0.25 * 0.75) ** 0.5
    fresh = [replace(c, memory={}) for c in clients]
    assert [method.steps(client) for client in fresh] == tau
    for wrong in ({"most_local_steps": 3}, {"most_local_steps": 30, "local_epochs": 1}):
        with pytest.raises(ConfigError, match="most_local_steps must be at least local_steps"):
            FedAvg(**wrong)
