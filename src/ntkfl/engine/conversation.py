"""One round in this process: every message is encoded, counted and decoded, as if it crossed a network."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ntkfl.errors import MessageError
from ntkfl.methods import Client, Method, Outcome, State, Task
from ntkfl.methods.statistics import answer, converse
from ntkfl.wire import Message

if TYPE_CHECKING:
    from ntkfl.engine.crowd import Crowd
    from ntkfl.engine.recording import Recorder


@dataclass
class Traffic:
    """Bytes of a round by direction and kind of message, rows dropped as bad, and the seconds the clients took."""

    uplink: Counter[str] = field(default_factory=Counter)
    downlink: Counter[str] = field(default_factory=Counter)
    dropped: int = 0
    client_seconds: float = 0.0


def play_round(
    task: Task,
    method: Method,
    state: State,
    number: int,
    clients: Sequence[Client],
    recorder: Recorder | None = None,
) -> tuple[Outcome, Traffic]:
    """Run the method's conversation with `clients` (ordered by id) to its end; `recorder` hears all of it."""
    traffic = Traffic()
    crowd = _crowd(number, clients) if method.shuffle else None
    conversation = converse(method, task, state, number, [client.id for client in clients])
    outgoing = next(conversation)
    while True:
        began = time.perf_counter()
        if isinstance(outgoing, Message):
            answers = _ask(task, method, outgoing, clients, traffic)
        else:
            each = [(outgoing[client.id], client) for client in clients]
            answers = [reply for m, client in each for reply in _ask(task, method, m, [client], traffic)]
        traffic.client_seconds += time.perf_counter() - began
        if recorder:
            recorder.asked(method, outgoing, answers)
        replies = _mixed(task, method, answers, crowd, traffic) if crowd else _plain(answers, traffic)
        if recorder:
            recorder.answered(method, replies)
        try:
            outgoing = conversation.send(replies)
        except StopIteration as end:
            return end.value, traffic


def _ask(task: Task, method: Method, message: Message, clients: Sequence[Client], traffic: Traffic) -> list[Message]:
    payload = message.encode()
    traffic.downlink[message.kind] += len(payload) * len(clients)
    # All clients receive the same bytes, so decoding them once stands for each client's own decoding.
    return answer(method, task, Message.decode(payload), clients)


def _plain(answers: list[Message], traffic: Traffic) -> list[Message]:
    received = []
    while answers:  # each answer is let go as it is sent: uploads are large
        sent = answers.pop(0)
        reply = sent.encode()
        traffic.uplink[sent.kind] += len(reply)
        received.append(Message.decode(reply))
    return received


def _mixed(task: Task, method: Method, answers: Sequence[Message], crowd: Crowd, traffic: Traffic) -> list[Message]:
    received, sent = crowd.exchange(method, task, answers)
    traffic.uplink[answers[0].kind] += sent
    traffic.dropped += received.dropped
    if not received.replies:
        raise MessageError(f"none of the {received.dropped} rows of the round could be used")
    return received.replies


def _crowd(number: int, clients: Sequence[Client]) -> Crowd:
    from ntkfl.engine.crowd import Crowd  # sealing is an extra, and only shuffled runs need it

    return Crowd(number, [client.id for client in clients])
