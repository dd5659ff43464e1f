"""FedPM: the step of the pooled curvature, and what its paper claims of it."""

from __future__ import annotations

import pytest
import torch
from ntkfl_experiments.rivals.fedpm import FedPM, MixedUpdate
from torch import Tensor, nn

from ntkfl.errors import MessageError
from ntkfl.methods import ClientRound, Task
from ntkfl.privacy.randomness import Randomness
from tests.methods.rounds import DIMENSIONS, ask, broadcast, gradient, play, pooled, receive, small_clients, small_task

PLAIN = {"lr": 1.0, "local_steps": 1}


def linear(loss: str) -> Task:
    torch.manual_seed(0)
    return Task(nn.Linear(*DIMENSIONS).double(), DIMENSIONS[1], loss)


def one_hot(y: Tensor) -> Tensor:
    return nn.functional.one_hot(y, DIMENSIONS[1]).double()


def test_one_round_solves_least_squares_of_the_pooled_data() -> None:
    """Though no client could alone: some have fewer samples than inputs. FOOF is d2 times the Hessian of the mean."""
    task, clients = linear("mse"), small_clients(3, 25, 4, 12)
    options = PLAIN | {"lr": DIMENSIONS[1], "weighting": "samples", "damping": 1e-9}
    state = play(FedPM(loss="mse", **options), task, clients)[0].state
    x, y = pooled(clients)
    a = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    solution = torch.linalg.lstsq(a, one_hot(y)).solution
    expected = torch.cat([solution[:-1].mT.reshape(-1), solution[-1]])
    torch.testing.assert_close(state["weights"], expected, atol=1e-5, rtol=0)


def test_foof_is_a_layers_own_inputs() -> None:
    """One step of one client, written out for every layer of a small network."""
    task, clients = small_task(), small_clients(20)
    state = play(FedPM(damping=0.3, **PLAIN | {"lr": 0.5}), task, clients)[0].state
    x, y = clients[0].x, clients[0].y
    first, act, last = task.at(task.like)
    g, found, at = gradient(task, task.like, x, y), [], 0
    for layer, seen in ((first, x), (last, act(first(x)))):
        a = torch.cat([seen, torch.ones(20, 1).double()], 1)
        n_out, n_in = layer.weight.shape
        own = torch.cat([g[at : at + n_out * n_in].view(n_out, n_in), g[at + n_out * n_in :][:n_out, None]], 1)
        step = own @ torch.linalg.inv(a.mT @ a / 20 + 0.3 * torch.eye(n_in + 1).double())
        found += [step[:, :-1].reshape(-1), step[:, -1]]
        at += n_out * (n_in + 1)
    torch.testing.assert_close(state["weights"], task.like - 0.5 * torch.cat(found).detach(), atol=1e-10, rtol=0)


def test_convolutions_see_every_position() -> None:
    """Two channels of 3×3: Σ over samples and positions of patches, and P = 1 for weights of no such layer."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(18, 3)).double()
    task = Task(model, 3, "ce")
    client = ClientRound(0, torch.randn(6, 1, 5, 5).double(), torch.arange(6) % 3, Randomness.simulated(0))
    reply = FedPM().answer(task, broadcast(task), client)
    patches = nn.functional.unfold(client.x, 3).mT.reshape(-1, 9)
    a = torch.cat([patches, torch.ones(len(patches), 1).double()], 1)
    i, j = torch.triu_indices(10, 10)
    torch.testing.assert_close(reply.arrays["0-18+18-20/inputs"][0], (a.mT @ a / 6)[i, j])
    assert sorted(name for name in reply.arrays if "/" in name) == ["0-18+18-20/inputs", "24-78+78-81/inputs"]


def test_a_preconditioner_that_is_none_is_refused() -> None:
    task, clients = small_task(), small_clients(5, 6, 7)
    method = FedPM()
    replies = [ask(method, task, client) for client in clients]
    name = next(name for name in replies[0].arrays if "/" in name)
    values = replies[0].arrays[name]
    for arrays in (
        {name: values[:, :-1]},
        {"0-9/outputs": values},
        {"5-2/inputs": values},
        {"0-9+9-99/inputs": values},
    ):
        with pytest.raises(MessageError, match="is no preconditioner"):
            receive(method, task, MixedUpdate({**replies[0].arrays, **arrays}).message(1))
    for arrays, why in (
        ({name: -1e6 * values}, "not positive definite"),
        ({"0-1/inputs": torch.ones(1, 1).double()}, "different networks"),
    ):
        conversation = method.round(task, method.start(task, task.like), 1, [0, 1, 2])
        next(conversation)
        with pytest.raises(MessageError, match=why):
            conversation.send([MixedUpdate({**replies[0].arrays, **arrays}), *replies[1:]])
