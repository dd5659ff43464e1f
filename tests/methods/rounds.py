"""A conversation played with real bytes, and small federations to play it with."""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ntkfl.methods import NTKFL, ClientRound, Method, Outcome, State, Task
from ntkfl.methods.base import Outgoing, Replies
from ntkfl.methods.ntk_fl import CandidateLosses, choose
from ntkfl.methods.replies import Reply
from ntkfl.models import resnet
from ntkfl.privacy.randomness import Randomness
from ntkfl.tangent.parameters import unflatten
from ntkfl.wire.message import Message

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
        replies = []
        for client in clients:
            payload = (outgoing if isinstance(outgoing, Message) else outgoing[client.id]).encode()
            question = Message.decode(payload)
            log.append(Sent("down", client.id, question.kind, len(payload), question))
            payload = method.answer(client_task or task, question, client).message(number).encode()
            reply = Message.decode(payload)
            log.append(Sent("up", client.id, reply.kind, len(payload), reply))
            replies.append(method.replies[question.kind].parse(reply, task))
        try:
            outgoing = conversation.send(replies)
        except StopIteration as end:
            assert before.keys() == state.keys()
            assert all(torch.equal(before[k], state[k]) for k in before)
            return end.value, log


def ask(method: Method, task: Task, client: ClientRound, number: int = 1) -> Reply:
    """The client's reply to the weights that training begins from, as the server parses it."""
    return receive(method, task, method.answer(task, broadcast(task, number), client).message(number))


def receive(method: Method, task: Task, message: Message) -> Reply:
    """A reply to the weights, parsed off its bytes."""
    return method.replies["weights"].parse(Message.decode(message.encode()), task)


def broadcast(task: Task, number: int = 1) -> Message:
    return Message("weights", number, {"weights": task.like})


def play_rounds(method: Method, task: Task, clients: Sequence[ClientRound], rounds: int) -> State:
    state = method.start(task, task.like)
    for number in range(1, rounds + 1):
        state = play(method, task, clients, state, number)[0].state
    return state


def small_task(
    loss: str = "ce", dtype: torch.dtype = torch.float64, shared: tuple[Tensor, Tensor] | None = None, **more: object
) -> Task:
    inputs, outputs = DIMENSIONS
    model = nn.Sequential(nn.Linear(inputs, 7), nn.Tanh(), nn.Linear(7, outputs)).to(dtype)
    task = Task(model, outputs, loss, **more)  # type: ignore[arg-type]
    task.shared = shared
    task.example = torch.zeros(1, inputs, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    return task


class Whole(NTKFL):
    """With candidates as they are: their losses are compared with those of exact ones."""

    tolerance: ClassVar[float] = 1e-9

    def select(self, task: Task, candidates: Tensor, round: int) -> Generator[Outgoing, Replies, tuple[int, float]]:
        replies = yield Message("candidates", round, {"weights": candidates})
        return choose(replies, task.robust.trim_losses)

    def answer(self, task: Task, question: Message, client: ClientRound) -> Reply:
        if question.kind == "candidates":
            return CandidateLosses.of(task, question.take("weights", None, task.like), client)
        return super().answer(task, question, client)


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
    task = Task(OneWeight(w), 1, "mse", **more)  # type: ignore[arg-type]
    task.example = torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    return task


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
    task = Task(model, DIMENSIONS[1], "ce")
    task.example = torch.zeros_like(x[:1]), torch.zeros_like(y[:1])
    return task, dealt(x, y, list(torch.arange(45).split(15)))
