"""A conversation played with real bytes, and small federations to play it with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ntkfl.methods import NTKFL, ClientRound, Method, Outcome, State, Task
from ntkfl.models import resnet
from ntkfl.privacy.randomness import Randomness
from ntkfl.tangent.parameters import unflatten
from ntkfl.wire import Message

DIMENSIONS = (5, 3)


class Sent(NamedTuple):
    """One message on its way: 'down' or 'up', which client's, and its length in bytes."""

    way: str
    client: int
    kind: str
    size: int
    message: Message


def play(
    method: Method,
    task: Task,
    clients: Sequence[ClientRound],
    state: State | None = None,
    number: int = 1,
    client_task: Task | None = None,
) -> tuple[Outcome, list[Sent]]:
    """One round; `client_task` is the clients' own where they live elsewhere. The state given must not be changed."""
    state = state if state is not None else method.start(task, task.like)
    before = copy.deepcopy(state)
    log: list[Sent] = []
    conversation = method.round(task, state, number, [c.id for c in clients])
    outgoing = next(conversation)
    while True:
        groups = (
            [(outgoing, list(clients))] if isinstance(outgoing, Message) else [(outgoing[c.id], [c]) for c in clients]
        )
        replies = []
        for message, group in groups:
            payload = message.encode()
            arrived = Message.decode(payload)
            log += [Sent("down", c.id, message.kind, len(payload), arrived) for c in group]
            for client, answer in zip(group, method.answer(client_task or task, arrived, group), strict=True):
                reply = answer.encode()
                replies.append(Message.decode(reply))
                log.append(Sent("up", client.id, answer.kind, len(reply), replies[-1]))
        try:
            outgoing = conversation.send(replies)
        except StopIteration as end:
            assert before.keys() == state.keys()
            assert all(torch.equal(before[k], state[k]) for k in before)
            return end.value, log


def play_rounds(method: Method, task: Task, clients: Sequence[ClientRound], rounds: int) -> State:
    state = method.start(task, task.like)
    for number in range(1, rounds + 1):
        state = play(method, task, clients, state, number)[0].state
    return state


def small_task(loss: str = "ce", dtype: torch.dtype = torch.float64, **more: object) -> Task:
    inputs, outputs = DIMENSIONS
    model = nn.Sequential(nn.Linear(inputs, 7), nn.Tanh(), nn.Linear(7, outputs)).to(dtype)
    return Task(model, outputs, loss, **more)  # type: ignore[arg-type]


class Whole(NTKFL):
    """With candidates as they are: their losses are compared with those of exact ones."""

    tolerance: ClassVar[float] = 1e-9

    def packed(self, candidates: Tensor) -> dict[str, Tensor]:
        return {"weights": candidates}

    def unpacked(self, message: Message, like: Tensor) -> Tensor:
        return message.take("weights", (None, like.numel()), like)


def small_clients(*sizes: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[ClientRound]:
    """Clients of these sizes, each with inputs of its own mean and labels of its own mixture."""
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for i, n in enumerate(sizes):
        shift = torch.randn(1, DIMENSIONS[0], generator=generator, dtype=torch.float64)
        x = torch.randn(n, DIMENSIONS[0], generator=generator, dtype=torch.float64) + shift
        y = torch.randint(0, DIMENSIONS[1] - i % 2, (n,), generator=generator)
        clients.append(ClientRound(i, x.to(dtype), y, Randomness.simulated(1000 * seed + i)))
    return clients


class OneWeight(nn.Module):
    """f(x) = w x: with loss 'mse' a client of one sample (x, y) has the loss ½ (w x − y)²."""

    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[w]], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def one_weight(w: float, **more: object) -> Task:
    return Task(OneWeight(w), 1, "mse", **more)  # type: ignore[arg-type]


def scalar_client(id: int, x: float, y: float, n: int = 1) -> ClientRound:
    """n times the sample (x, y)."""
    return ClientRound(
        id,
        torch.full((n, 1), x, dtype=torch.float64),
        torch.full((n, 1), y, dtype=torch.float64),
        Randomness.simulated(id),
    )


def gradient(task: Task, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """∇ of the mean loss by plain autograd, without vmap or functional calls of ours."""
    w = weights.clone().requires_grad_()
    f = torch.func.functional_call(task.model, unflatten(task.model, w), (x,))
    if task.loss == "ce":
        loss = nn.functional.cross_entropy(f, y)
    else:
        Y = y if y.is_floating_point() else nn.functional.one_hot(y, task.outputs).to(f)
        loss = 0.5 * (f - Y).square().mean()
    return torch.autograd.grad(loss, w)[0]


def pooled(clients: list[ClientRound]) -> tuple[Tensor, Tensor]:
    return torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])


def dealt(x: Tensor, y: Tensor, rows: list[Tensor]) -> list[ClientRound]:
    return [ClientRound(i, x[own], y[own], Randomness.simulated(i)) for i, own in enumerate(rows)]


def convolutional(dtype: torch.dtype = torch.float64) -> tuple[Task, list[ClientRound]]:
    """A small residual network that averages over positions, and three clients for it."""
    torch.manual_seed(0)
    model = resnet((1, 6, 6), DIMENSIONS[1], channels=(4, 8)).to(dtype)
    x, y = torch.randn(45, 1, 6, 6, dtype=dtype), torch.arange(45) % DIMENSIONS[1]
    x += y.view(-1, 1, 1, 1) * torch.linspace(-1, 1, 6, dtype=dtype)
    return Task(model, DIMENSIONS[1], "ce"), dealt(x, y, list(torch.arange(45).split(15)))
