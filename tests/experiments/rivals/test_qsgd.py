"""QSGD and FedCOM: what they send, and where the model goes."""

from __future__ import annotations

import pytest
import torch
from ntkfl_experiments.rivals.qsgd import QSGD, FedCOM, Quantised

from ntkfl.errors import NumericalError
from ntkfl.methods import FedAvg
from ntkfl.privacy.randomness import Randomness
from tests.methods.rounds import ask, gradient, play, small_clients, small_task


def rounding_to(bits: int, norm: str = "l2") -> type[QSGD]:
    """QSGD with other levels than its own."""
    reply = type("Levels", (Quantised,), {"bits": bits, "norm": norm})
    return type("Rounding", (QSGD,), {"__module__": __name__, "replies": {"weights": reply}})


def test_it_follows_the_gradient_but_for_rounding() -> None:
    task, clients = small_task(), small_clients(10, 25, 7)
    gradients = [gradient(task, task.like, c.x, c.y) for c in clients]
    outcome, _ = play(rounding_to(12, "max")(lr=0.3), task, clients)
    error = (outcome.state["weights"] - (task.like - 0.3 * sum(gradients) / 3)).abs().max()
    coarsest = 0.3 * max(float(g.abs().max()) for g in gradients) / 2047
    assert 0 < float(error) < coarsest


def test_fedcom_is_fedavg_but_for_rounding() -> None:
    local = {"lr": 0.3, "local_steps": 5, "batch_size": 8}
    task, clients = small_task(), small_clients(10, 25, 7)
    avg = play(FedAvg(**local), task, clients)[0].state["weights"]
    ends = [play(FedAvg(**local), task, [c])[0].state["weights"] for c in clients]
    outcome, log = play(FedCOM(**local), task, clients)
    coarsest = max(float((w - task.like).abs().max()) for w in ends) / 127
    assert 0 < float((outcome.state["weights"] - avg).abs().max()) < coarsest
    assert all(task.like.numel() < sent.size < task.like.numel() + 128 for sent in log if sent.way == "up")
    double, _ = play(FedCOM(server_lr=2, **local), task, clients)
    step, step2 = (o.state["weights"] - task.like for o in (outcome, double))
    torch.testing.assert_close(step2, 2 * step, atol=1e-12, rtol=0)


@pytest.mark.parametrize("norm", ["l2", "max"])
def test_it_is_unbiased(norm: str) -> None:
    task, clients = small_task(), small_clients(10, 25)
    exact = play(FedAvg(lr=1, local_steps=1), task, clients)[0].state["weights"]
    ends = []
    for trial in range(144):
        for client in clients:
            client.randomness = Randomness.simulated(trial, client.id)
        ends.append(play(rounding_to(3, norm)(lr=1), task, clients)[0].state["weights"])
    ends_ = torch.stack(ends)
    deviation = (ends_.mean(0) - exact) / (ends_.std(0) / 12).clamp(min=1e-9)
    assert float(deviation.abs().max()) < 4.5
    assert float(ends_.std(0).max()) > 1e-3


def test_what_is_not_finite_does_not_become_levels() -> None:
    task, client = small_task(), small_clients(5)[0]
    for bad in (torch.nan, torch.inf):
        with pytest.raises(NumericalError, match="not finite"):
            Quantised.encode(torch.full_like(task.like, bad), client.randomness)
    client.x *= torch.nan
    with pytest.raises(NumericalError, match="client 0"):
        play(QSGD(), task, [client])


def test_another_vector_in_the_same_reply() -> None:
    task, (client,) = small_task(), small_clients(5)
    reply = ask(QSGD(), task, client)
    turned = reply.with_vectors({"gradient": -reply.vector("gradient", task.like)})
    error = (turned.vector("gradient", task.like) + reply.vector("gradient", task.like)).abs().max()
    assert float(error) <= float(reply.arrays["norms"][0]) / 7  # one level
    assert turned.samples == reply.samples
