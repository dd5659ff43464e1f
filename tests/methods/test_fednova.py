"""FedNova: FedAvg where clients take equally many steps, the true optimum where they do not."""

from __future__ import annotations

import pytest
import torch

from ntkfl.methods import FedAvg, FedNova
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
