"""FedFisher: one round on problems where it is exact, its equations solved, and its Fisher information."""

from __future__ import annotations

import pytest
import torch
from ntkfl_experiments.rivals.fedfisher import FedFisher, FisherUpdate
from torch import Tensor, nn

from ntkfl.errors import MessageError
from ntkfl.methods import ClientRound, FedAvg, Task
from ntkfl.methods.replies import Reply
from ntkfl.tangent.losses import find_loss
from ntkfl.tangent.parameters import call_with, unflatten
from tests.methods.rounds import DIMENSIONS, ask, play, receive, small_clients, small_task

LOCAL = {"lr": 0.3, "local_steps": 5}


def linear() -> Task:
    torch.manual_seed(0)
    return Task(nn.Linear(*DIMENSIONS).double(), DIMENSIONS[1], "mse")


def replies_of(method: FedFisher, task: Task, clients: list[ClientRound]) -> list[Reply]:
    return [ask(method, task, client) for client in clients]


def curvature(task: Task, w: Tensor, x: Tensor) -> Tensor:
    """Σ_i J_iᵀ H_i J_i / n by autograd, [d, d]."""
    J = torch.func.vmap(
        lambda one: torch.func.jacrev(lambda v: call_with(task.model, unflatten(task.model, v), one.unsqueeze(0))[0])(w)
    )(x)
    f = task.predict(w, x)
    R = find_loss(task.loss).hessian_root(f, torch.zeros_like(f))
    rows = (R.mT @ J).flatten(0, 1)
    return rows.mT @ rows / len(x)


def test_one_round_solves_least_squares_of_the_pooled_data() -> None:
    """Local optima and their curvature are all there is to know of quadratic losses."""
    task, clients = linear(), small_clients(30, 12, 21)
    method = FedFisher(loss="mse", lr=0.5, local_steps=600, damping=1e-9, weighting="samples")
    state = play(method, task, clients)[0].state
    x, y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
    a = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    solution = torch.linalg.lstsq(a, nn.functional.one_hot(y, DIMENSIONS[1]).double()).solution
    expected = torch.cat([solution[:-1].mT.reshape(-1), solution[-1]])
    torch.testing.assert_close(state["weights"], expected, atol=1e-4, rtol=0)
    mean = play(FedAvg(loss="mse", lr=0.5, local_steps=600, weighting="samples"), task, clients)[0].state
    assert float((mean["weights"] - expected).norm()) > 0.05


def test_the_kronecker_products_equations_are_solved() -> None:
    """Written out as dense matrices: A ⊗ G of both layers, biases among their inputs."""
    task, clients = small_task(), small_clients(10, 25, 7)
    method = FedFisher(damping=0.02, **LOCAL)
    state, replies = play(method, task, clients)[0].state, replies_of(method, task, clients)
    d, mean = task.like.numel(), torch.stack([r.arrays["weights"] for r in replies]).mean(0)
    slope = 0.02 * (state["weights"] - mean)
    for client, reply in zip(clients, replies, strict=True):
        w_m = reply.arrays["weights"]
        first, act, last = task.at(w_m)
        hidden = act(first(client.x)).detach()
        f = task.predict(w_m, client.x)
        R = find_loss("ce").hessian_root(f, torch.zeros_like(f))
        behind = R.mT @ (last.weight.detach() * (1 - hidden.square()).unsqueeze(1))  # b of the first layer, [n, c, 7]
        F, at = torch.zeros(d, d).double(), 0
        for seen, b in ((client.x, behind), (hidden, R.mT)):
            a = torch.cat([seen, torch.ones(len(seen), 1).double()], 1)
            A, G = a.mT @ a / len(a), torch.einsum("nci,ncj->ij", b, b) / len(a)
            n_out, m = len(G), len(A)
            order = torch.arange(n_out * m).view(n_out, m)
            columns = torch.cat([order[:, :-1].reshape(-1), order[:, -1]])  # weights first, then biases
            F[at : at + n_out * m, at : at + n_out * m] = torch.kron(G, A)[columns][:, columns]
            at += n_out * m
        slope += F @ (state["weights"] - w_m) / 3
    torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-8, rtol=0)


def test_the_diagonal_is_that_of_the_fisher_information() -> None:
    task, clients = small_task(), small_clients(10, 25)
    method = FedFisher(fisher="diagonal", damping=0.05, **LOCAL)
    replies = replies_of(method, task, clients)
    ends = torch.stack([r.arrays["weights"] for r in replies])
    squares = torch.stack([r.arrays["fisher"] for r in replies])
    for client, own, w_m in zip(clients, squares, ends, strict=True):
        torch.testing.assert_close(own, curvature(task, w_m, client.x).diagonal(), atol=1e-12, rtol=1e-9)
    state = play(method, task, clients)[0].state
    expected = ((squares * ends).mean(0) + 0.05 * ends.mean(0)) / (squares.mean(0) + 0.05)
    torch.testing.assert_close(state["weights"], expected, atol=1e-8, rtol=0)


def test_a_fisher_information_that_is_none_is_refused() -> None:
    task, clients = small_task(), small_clients(5, 6, 7)
    for fisher in ("kfac", "diagonal"):
        method = FedFisher(fisher=fisher, **LOCAL)
        replies = replies_of(method, task, clients)
        name = next(name for name in replies[0].arrays if "/" in name or name == "fisher")
        values = replies[0].arrays[name]
        with pytest.raises(MessageError, match=r"is no factor|must be a diagonal"):
            receive(method, task, FisherUpdate({**replies[0].arrays, name: values[..., :-1]}).message(1))
        conversation = method.round(task, method.start(task, task.like), 1, [0, 1, 2])
        next(conversation)
        with pytest.raises(MessageError, match="not positive semidefinite"):
            conversation.send([FisherUpdate({**replies[0].arrays, name: -1e9 * values.abs()}), *replies[1:]])
