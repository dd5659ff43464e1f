"""Replay: what the server keeps, and what it makes of it."""

from __future__ import annotations

import pytest
import torch

import ntkfl
from ntkfl.errors import ConfigError
from ntkfl.methods import CPNTKFL, NTKFL, ClientRound
from ntkfl.methods.replay import INPUTS, LABELS, balanced
from ntkfl.privacy.randomness import Randomness
from tests.methods.rounds import play, small_clients, small_task


def test_the_server_keeps_exactly_the_projected_inputs() -> None:
    task, clients = small_task(dtype=torch.float64), small_clients(8, 5)
    outcome, _ = play(NTKFL(replay=True, replay_per_class=3), task, clients)
    assert (outcome.state[INPUTS] - torch.cat([c.x for c in clients])).abs().max() < 1e-12
    assert torch.equal(outcome.state[LABELS], torch.cat([c.y for c in clients]))
    assert len(outcome.passed) == 4
    assert outcome.diagnostics["kept_samples"] == 13
    second, _ = play(NTKFL(replay=True, replay_per_class=3), task, clients, outcome.state, 2)
    assert len(second.state[LABELS]) == 26


def test_a_replayed_evolution_is_an_evolution() -> None:
    """One more step on one client's rows drawn whole is NTK-FL's own next round on them."""
    (client,) = small_clients(12)
    client.y = torch.arange(12) % 3
    task = small_task(dtype=torch.float64)
    method = NTKFL(replay=True, replay_evolutions=1, replay_per_class=4, label_smoothing=0)
    outcome, _ = play(method, task, [client])
    plain = NTKFL(label_smoothing=0)
    first, _ = play(plain, task, [client])
    second, _ = play(plain, task, [client], first.state, 2)
    assert torch.equal(outcome.passed[0], first.state["weights"])
    assert (outcome.state["weights"] - second.state["weights"]).abs().max() < 1e-4


def test_replay_needs_inputs_it_can_have() -> None:
    with pytest.raises(ConfigError, match="codec 'factored'"):
        NTKFL(replay=True, codec="dense")
    with pytest.raises(ConfigError, match="codec 'factored'"):
        CPNTKFL(replay=True, codec="topk", sparsity=0.9)
    scaled = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    task = ntkfl.methods.Task(scaled, 3, "ce")
    with pytest.raises(ConfigError, match="gets the inputs themselves"):
        play(
            NTKFL(replay=True),
            task,
            [ClientRound(0, 3 * torch.randn(6, 5), torch.arange(6) % 3, Randomness.simulated(0))],
        )


def test_balanced_draws() -> None:
    y = torch.tensor([0] * 50 + [1] * 5 + [3] * 20)
    rows = balanced(y, 10, 4, 1, 2)
    assert torch.bincount(y[rows], minlength=4).tolist() == [10, 10, 0, 10]
    assert len(set(rows[:10].tolist())) == 10  # without repetition where there are enough
    assert torch.equal(rows, balanced(y, 10, 4, 1, 2))
    assert not torch.equal(rows, balanced(y, 10, 4, 1, 3))
    assert len(balanced(torch.randn(30, 2), 10, 2, 0)) == 20
