"""FedCOM and its gradient tracking."""

from __future__ import annotations

import pytest
import torch

from ntkfl.errors import ConfigError, MessageError
from ntkfl.methods import ClientRound, FedAvg, FedCOM
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message
from tests.methods.rounds import one_weight, play, play_rounds, scalar_client, small_clients, small_task

LOCAL = {"lr": 0.3, "local_steps": 5, "batch_size": 8}


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_it_is_fedavg_but_for_rounding(weighting: str) -> None:
    task, clients = small_task(), small_clients(10, 25, 7)
    avg = play(FedAvg(weighting=weighting, **LOCAL), task, clients)[0].state["weights"]
    locals_ = [play(FedAvg(**LOCAL), task, [c])[0].state["weights"] for c in clients]
    outcome, log = play(FedCOM(weighting=weighting, **LOCAL), task, clients)
    coarsest = max(float((w - task.like).abs().max()) for w in locals_) / 127
    assert 0 < float((outcome.state["weights"] - avg).abs().max()) < coarsest
    for sent in log:
        if sent.way == "up":
            assert task.like.numel() < sent.size < task.like.numel() + 128
    double, _ = play(FedCOM(weighting=weighting, server_lr=2, **LOCAL), task, clients)
    step, step2 = (o.state["weights"] - task.like for o in (outcome, double))
    torch.testing.assert_close(step2, 2 * step, atol=1e-12, rtol=0)


def test_tracking_by_hand() -> None:
    """One weight scaled by its own size is a top level: nothing is rounded but the norm, to float32."""
    w, lr, steps, server_lr = 2.0, 0.05, 3, 0.8
    data = ((1.0, 0.0), (3.0, 6.0))
    clients = [scalar_client(i, *sample) for i, sample in enumerate(data)]
    own = [0.0, 0.0]
    method = FedCOM(loss="mse", lr=lr, local_steps=steps, server_lr=server_lr, tracking=True)
    task = one_weight(w)
    state = method.start(task, task.like)
    for number in (1, 2, 3):
        updates = []
        for (x, y), offset in zip(data, own, strict=True):
            v = w
            for _ in range(steps):
                v = v - lr * (x * (x * v - y) - offset)
            updates.append((w - v) / lr)
        mean = sum(updates) / 2
        w = w - lr * server_lr * mean
        own = [o + (u - mean) / steps for o, u in zip(own, updates, strict=True)]
        state = play(method, task, clients, state, number)[0].state
        assert float(state["weights"]) == pytest.approx(w, rel=1e-6)
        assert [float(c.memory["offset"]) for c in clients] == pytest.approx(own, rel=1e-5)


def disagreeing_clients() -> list[ClientRound]:
    """Four least-squares problems in three weights, of which no two agree."""
    generator = torch.Generator().manual_seed(3)
    return [
        ClientRound(
            i, *(torch.randn(6, n, generator=generator, dtype=torch.float64) for n in (3, 1)), Randomness.simulated(i)
        )
        for i in range(4)
    ]


def test_tracking_finds_the_optimum_despite_rounding() -> None:
    task, clients = one_weight(0.0), disagreeing_clients()
    task.model.w = torch.nn.Parameter(torch.zeros(3, 1, dtype=torch.float64))
    task.like = torch.zeros(3, dtype=torch.float64)
    x, y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
    optimum = torch.linalg.lstsq(x, y).solution.squeeze(1)
    options = {"loss": "mse", "lr": 0.1, "local_steps": 10, "server_lr": 0.5, "bits": 4}
    tracked, plain = (
        play_rounds(FedCOM(tracking=tracking, **options), task, clients, rounds=60)["weights"]
        for tracking in (True, False)
    )
    torch.testing.assert_close(tracked, optimum, atol=1e-4, rtol=0)
    assert float((plain - optimum).norm()) > 1e-2


def test_tracking_costs_a_second_message_down() -> None:
    task, clients = small_task(), small_clients(10, 25)
    (_, plain), (_, tracked) = (play(FedCOM(tracking=t, **LOCAL), task, clients) for t in (False, True))
    assert [(s.way, s.kind) for s in plain] == [("down", "weights")] * 2 + [("up", "update")] * 2
    second = tracked[len(plain) :]
    assert [(s.way, s.kind) for s in second] == [("down", "update")] * 2 + [("up", "update")] * 2
    d = task.like.numel()
    assert all(8 * d < s.size < 8 * d + 64 for s in second[:2])
    assert all(s.size < 32 for s in second[2:])
    assert all(c.memory.keys() == {"offset"} for c in clients)


def test_an_average_out_of_place() -> None:
    task, clients = small_task(), small_clients(10)
    with pytest.raises(MessageError, match="sent none"):
        FedCOM(tracking=True).answer(task, Message("update", 1, {"average": task.like}), clients)
    with pytest.raises(ConfigError, match="local_steps"):
        FedCOM(tracking=True, local_epochs=2)
    with pytest.raises(ConfigError, match="equally many steps"):
        FedCOM(tracking=True, most_local_steps=30)
