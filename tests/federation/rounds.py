"""One round of the real server, over the real transports, with clients that a test made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from ntkfl.federation.client import Answer, LatestMemory
from ntkfl.federation.evaluation import OwnTestSet
from ntkfl.federation.local import LocalTransport, SimulatedClients
from ntkfl.federation.local_shuffler import LocalShuffler
from ntkfl.federation.server import Server
from ntkfl.federation.shuffled import open_rows
from ntkfl.federation.transport import Traffic, Transport
from ntkfl.federation.validation import filter_replies
from ntkfl.methods import ClientRound, Method, Outcome, State, Task
from ntkfl.methods.batchnorm import answer
from ntkfl.wire import Message


class Given:
    """Clients as they are in the round, whichever round it is."""

    def __init__(self, task: Task, method: Method, clients: Sequence[ClientRound], respond: Answer, rows: int) -> None:
        self.task, self.method, self.respond, self.rows = task, method, respond, rows
        self._clients = {client.id: _Same(client) for client in clients}
        self.fed = SimpleNamespace(standardization=None)

    def __getitem__(self, number: int) -> _Same:
        return self._clients[number]

    def load(self, numbers: Sequence[int]) -> None: ...


class _Same:
    def __init__(self, client: ClientRound) -> None:
        self._client, self.memory = client, LatestMemory()

    def at(self, round: int) -> ClientRound:
        return self._client

    def rest(self) -> None: ...


def server_of(
    task: Task, method: Method, clients: Sequence[ClientRound], respond: Answer = answer, rows: int | None = None
) -> Server:
    """A server that reaches these clients, through a shuffler where the method asks for one."""
    most = rows or max(len(client) for client in clients)
    transport: Transport = LocalTransport(cast(SimulatedClients, Given(task, method, clients, respond, most)))
    if method.shuffle:
        transport = LocalShuffler(transport, task, method, most)
    test = OwnTestSet((clients[0].x, clients[0].y))
    return Server(task.model, task, method, transport, test, clients_per_round=len(clients), seed=0)


def play_round(
    task: Task,
    method: Method,
    state: State,
    number: int,
    clients: Sequence[ClientRound],
    respond: Answer = answer,
    rows: int | None = None,
) -> tuple[Outcome, Traffic]:
    server = server_of(task, method, clients, respond, rows)
    server.state.state = state
    return server.attempt(number, [client.id for client in clients])


class Received(NamedTuple):
    """What the server has of an exchange's sealed rows once it has opened and validated them."""

    replies: list[Message]
    rows: int
    rejected: Counter[str]
    repeated: int

    @property
    def dropped(self) -> int:
        return self.rejected.total()


def receive(method: Method, task: Task, sealed: Sequence[bytes], *how: Any) -> Received:
    """`how`: the schema, the key that opens, the federation, the run and the announcement."""
    opened = open_rows(method, sealed, *how)
    filtered = filter_replies(method, task, opened.replies)
    return Received(filtered.replies, filtered.rows, +(opened.rejected + filtered.rejected), opened.repeated)
