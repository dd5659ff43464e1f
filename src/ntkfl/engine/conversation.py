"""One round in this process: every message is encoded, counted and decoded, as if it crossed a network."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ntkfl.methods import Client, Method, Outcome, State, Task
from ntkfl.wire import Message


@dataclass
class Traffic:
    """Bytes of a round by direction and kind of message, and the seconds the clients' side took."""

    uplink: Counter[str] = field(default_factory=Counter)
    downlink: Counter[str] = field(default_factory=Counter)
    client_seconds: float = 0.0


def play_round(
    task: Task, method: Method, state: State, number: int, clients: Sequence[Client]
) -> tuple[Outcome, Traffic]:
    """Run the method's conversation with `clients` (ordered by id) to its end."""
    traffic = Traffic()
    conversation = method.round(task, state, number, [client.id for client in clients])
    outgoing = next(conversation)
    while True:
        began = time.perf_counter()
        if isinstance(outgoing, Message):
            replies = _exchange(task, method, outgoing, clients, traffic)
        else:
            each = [(outgoing[client.id], client) for client in clients]
            replies = [reply for m, client in each for reply in _exchange(task, method, m, [client], traffic)]
        traffic.client_seconds += time.perf_counter() - began
        try:
            outgoing = conversation.send(replies)
        except StopIteration as end:
            return end.value, traffic


def _exchange(
    task: Task, method: Method, message: Message, clients: Sequence[Client], traffic: Traffic
) -> list[Message]:
    payload = message.encode()
    traffic.downlink[message.kind] += len(payload) * len(clients)
    # All clients receive the same bytes, so decoding them once stands for each client's own decoding.
    answers = method.answer(task, Message.decode(payload), clients)
    received = []
    for answer in answers:
        reply = answer.encode()
        traffic.uplink[answer.kind] += len(reply)
        received.append(Message.decode(reply))
    return received
