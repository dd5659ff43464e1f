"""One round of the real server, over the real transports, with clients that a test made."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import ntkfl
from ntkfl.federation.client import Answer, Client, honest, seeded
from ntkfl.federation.server import Server
from ntkfl.federation.shuffled import LocalShuffler
from ntkfl.federation.transport import LocalTransport, Traffic, Transport
from ntkfl.federation.validation import filter_replies
from ntkfl.methods import ClientRound, Method, Outcome, State, Task
from ntkfl.methods.base import settle
from ntkfl.methods.replies import Reply
from ntkfl.methods.robust import Robust
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.settings import Privacy
from ntkfl.wire import Message

# How rows travel: options of the method, and settings of privacy.
CODECS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"form": "dense"}, {}),
    ({}, {"sparsity": 0.5}),
    ({}, {"sparsity": 0.5, "values": "8bit"}),
]


def changed(message: Message, **arrays: Tensor) -> Message:
    """With these in place of its own."""
    return replace(message, arrays={**message.arrays, **arrays})


def small_task(method: Method, privacy: Privacy | None = None, robust: Robust | None = None) -> Task:
    """A small perceptron in float64, under settings checked as a run's are."""
    torch.manual_seed(0)
    own, bounds = settle(method, privacy, robust)
    inputs = own.projected_dim or 5
    task = Task(
        ntkfl.models.mlp(inputs, 4, 3).double(), 3, method.loss, privacy=own, robust=bounds, total_clients=5,
        label_smoothing=method.label_smoothing,
    )  # fmt: skip
    task.example = torch.zeros(1, inputs).double(), torch.zeros(1, dtype=torch.int64)
    return task


def small_client(number: int, samples: int, inputs: int = 5) -> ClientRound:
    draws = torch.Generator().manual_seed(number)
    x = torch.randn(samples, inputs, generator=draws, dtype=torch.float64)
    return ClientRound(number, x, torch.arange(samples) % 3, Randomness.simulated(number))


def lying(ids: Container[int], change: Callable[[str, Tensor], Tensor]) -> Answer:
    """Clients that send change(name, array) in place of each array of their reply."""

    def answer(method: Method, task: Task, question: Message, client: ClientRound) -> Reply:
        reply = honest(method, task, question, client)
        if client.id not in ids:
            return reply
        return type(reply)({name: change(name, a) for name, a in reply.arrays.items()}, reply.halves)

    return answer


def scaled(factor: float) -> Callable[[str, Tensor], Tensor]:
    """Every real number times the factor."""
    return lambda name, array: factor * array if array.is_floating_point() else array


class Given(Client):
    """A client as it is in the round, whichever round it is."""

    def __init__(self, task: Task, method: Method, client: ClientRound, respond: Answer) -> None:
        super().__init__(client.id, task, method, lambda: (client.x, client.y), seeded(0, client.id), respond=respond)
        self.given = client

    def at(self, round: int) -> ClientRound:
        return self.given

    def rest(self) -> None: ...


def server_of(
    task: Task, method: Method, clients: Sequence[ClientRound], respond: Answer = honest, rows: int | None = None
) -> Server:
    """A server that reaches these clients, through a shuffler where the task's privacy asks for one."""
    fed = ntkfl.data.from_clients([(client.x, client.y) for client in clients], test=(clients[0].x, clients[0].y))
    transport: Transport = _Given({client.id: Given(task, method, client, respond) for client in clients}, fed, task)
    if task.privacy.shuffle or task.privacy.secure_sum:
        transport = LocalShuffler(transport, task, method, rows or max(map(len, clients)))
    test = clients[0].x, clients[0].y
    return Server(task.model, task, method, transport, test, clients_per_round=len(clients), seed=0)


class _Given(LocalTransport):
    """To clients that a test made."""

    def __init__(self, clients: dict[int, Given], fed: ntkfl.data.Federated, task: Task) -> None:
        self._given, self.fed, self.task, self.byzantine = clients, fed, task, None

    def __getitem__(self, number: int) -> Given:
        return self._given[number]


def sifted(kind: type[Reply], task: Task, messages: Sequence[Message]) -> SimpleNamespace:
    """The replies that validation leaves, with what it counted."""
    traffic = Traffic()
    replies = filter_replies(kind, task, messages, traffic)
    return SimpleNamespace(replies=replies, **vars(traffic))


def play_round(
    task: Task,
    method: Method,
    state: State,
    number: int,
    clients: Sequence[ClientRound],
    respond: Answer = honest,
    rows: int | None = None,
) -> tuple[Outcome, Traffic]:
    server = server_of(task, method, clients, respond, rows)
    server.state.state = state
    return server.attempt(number, [client.id for client in clients])
