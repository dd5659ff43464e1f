"""QSGD as a method: what it sends, and where the model goes."""

from __future__ import annotations

import pytest
import torch

import ntkfl.models
from ntkfl.errors import MessageError, NumericalError
from ntkfl.methods import QSGD, ClientRound, FedAvg, Task
from ntkfl.methods.local_training import report
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message
from tests.methods.rounds import gradient, play, small_clients, small_task


def rounding_to(bits: int, norm: str = "l2") -> type[QSGD]:
    """QSGD with other levels than its own."""
    return type("Rounding", (QSGD,), {"__module__": __name__, "bits": bits, "norm": norm})


def test_it_follows_the_gradient_but_for_rounding() -> None:
    task, clients = small_task(), small_clients(10, 25, 7)
    gradients = [gradient(task, task.like, c.x, c.y) for c in clients]
    outcome, _ = play(rounding_to(12, "max")(lr=0.3), task, clients)
    error = (outcome.state["weights"] - (task.like - 0.3 * sum(gradients) / 3)).abs().max()
    coarsest = 0.3 * max(float(g.abs().max()) for g in gradients) / 2047
    assert 0 < float(error) < coarsest


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


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_bytes_of_the_papers_network(bits: int) -> None:
    task = Task(ntkfl.models.mlp(784, 100, 10), 10, "ce")
    clients = [ClientRound(i, torch.randn(4, 784), torch.arange(4), Randomness.simulated(i)) for i in range(2)]
    exact = -(-79_510 * bits // 8) + 4
    for sent in play(rounding_to(bits)(), task, clients)[1]:
        if sent.way == "up":
            assert exact < sent.size < exact + 128


def test_what_is_not_finite_does_not_become_levels() -> None:
    task, client = small_task(), small_clients(5)[0]
    for bad in (torch.nan, torch.inf):
        with pytest.raises(NumericalError, match="not finite"):
            QSGD().compress(torch.full_like(task.like, bad), client)
    client.x *= torch.nan
    with pytest.raises(NumericalError, match="client 0"):
        play(QSGD(), task, [client])


def test_the_server_refuses_what_is_no_quantised_vector() -> None:
    task, client = small_task(), small_clients(5)[0]
    good = QSGD().compress(task.like, client) | report(client, torch.tensor(1.0))
    codes, norms = good["codes"], good["norms"]
    for change in (
        {"codes": codes[:-1]},
        {"codes": torch.cat([codes, codes[:1]])},
        {"codes": codes.to(torch.int32)},
        {"codes": codes.unsqueeze(0)},
        {"norms": -norms},
        {"norms": norms * torch.nan},
        {"norms": norms.double()},
        {"norms": torch.cat([norms, norms])},
    ):
        conversation = QSGD().round(task, QSGD().start(task, task.like), 1, [0])
        next(conversation)
        with pytest.raises(MessageError):
            conversation.send([Message("update", 1, good | change)])


def test_options() -> None:
    assert (QSGD().local_steps, QSGD.bits, QSGD.norm) == (1, 4, "l2")
