"""Data sharing: FedAvg on more data, which is sent to each client once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ntkfl.methods import ClientRound, DataShare, FedAvg, Task
from ntkfl.tangent.parameters import unflatten, with_values
from tests.methods.rounds import play, play_rounds, small_clients, small_task

OPTIONS = {"lr": 0.3, "local_steps": 5, "batch_size": 8}


def shared_set(n: int = 13) -> tuple[Tensor, Tensor]:
    (client,) = small_clients(n, seed=7)
    return client.x, client.y


def enlarged(clients: list[ClientRound], shared: tuple[Tensor, Tensor]) -> list[ClientRound]:
    x, y = shared
    return [replace(c, x=torch.cat([c.x, x]), y=torch.cat([c.y, y]), memory={}) for c in clients]


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_nothing_shared_is_fedavg(weighting: str) -> None:
    clients, task = small_clients(10, 25), small_task()
    share, avg = (
        play_rounds(method(weighting=weighting, **OPTIONS), task, clients, 3)["weights"]
        for method in (DataShare, FedAvg)
    )
    assert torch.equal(share, avg)
    assert all(not c.memory for c in clients)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_it_is_fedavg_on_more_data(weighting: str, apart: bool) -> None:
    """Also where the clients live elsewhere, and must keep what they are given themselves."""
    shared, clients = shared_set(), small_clients(10, 25, 7)
    task = small_task(shared=shared)
    elsewhere = Task(task.model, task.outputs, task.loss) if apart else task
    more = enlarged(clients, shared)
    share, avg = DataShare(weighting=weighting, **OPTIONS), FedAvg(weighting=weighting, **OPTIONS)
    state, expected = share.start(task, task.like), avg.start(task, task.like)
    for number, cohort in enumerate([(0, 1), (0, 1, 2), (1, 2), (0, 2)], 1):
        state = play(share, task, [clients[i] for i in cohort], state, number, elsewhere)[0].state
        expected = play(avg, task, [more[i] for i in cohort], expected, number)[0].state
        torch.testing.assert_close(state["weights"], expected["weights"], atol=1e-12, rtol=0)
    assert state["holders"].tolist() == [0, 1, 2]
    for client in clients:
        if apart:
            assert torch.equal(client.memory["shared_x"], shared[0])
            assert torch.equal(client.memory["shared_y"], shared[1])
        else:
            assert sum(t.numel() for t in client.memory.values()) == 1


def test_each_client_is_sent_the_set_once() -> None:
    task, clients = small_task(shared=shared_set(13)), small_clients(10, 25, 7, 9)
    plain = next(s.size for s in play(FedAvg(**OPTIONS), task, clients)[1] if s.way == "down")
    extra = 13 * (5 * 8 + 1)
    method = DataShare(**OPTIONS)
    state, seen = method.start(task, task.like), set[int]()
    for number, cohort in enumerate([(0, 1), (1, 2), (0, 1, 2), (0, 3)], 1):
        outcome, log = play(method, task, [clients[i] for i in cohort], state, number)
        state = outcome.state
        for sent in log:
            if sent.way == "down" and sent.client in seen:
                assert sent.size == plain
            elif sent.way == "down":
                assert plain + extra < sent.size < plain + extra + 64
        seen |= set(cohort)
    assert state["holders"].tolist() == [0, 1, 2, 3]


def test_it_can_begin_from_a_model_trained_on_what_is_shared() -> None:
    """Whole-batch descent on G, by hand; the client's first training then begins there."""
    x, y = shared_set()
    task = small_task(shared=(x, y))
    w, lr = task.like.clone(), 0.3
    for _ in range(4):
        w.requires_grad_()
        loss = torch.nn.functional.cross_entropy(with_values(task.model, unflatten(task.model, w))(x), y)
        w = (w - lr * torch.autograd.grad(loss, w)[0]).detach()
    warm = DataShare(lr=lr, batch_size=100, warm_steps=4).start(task, task.like)
    torch.testing.assert_close(warm["weights"], w, atol=1e-9, rtol=0)
    assert torch.equal(DataShare(lr=lr).start(task, task.like)["weights"], task.like)
    assert torch.equal(DataShare(lr=lr, warm_steps=4).start(small_task(), task.like)["weights"], task.like)
