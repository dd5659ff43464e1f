"""One round: the method's conversation, held with clients in this process or by whoever carries messages to others.

In this process too every message is encoded, counted and decoded, as if it crossed a network.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ntkfl.errors import MessageError, TooFew
from ntkfl.methods import Client, Method, Outcome, State, Task
from ntkfl.methods.base import Outgoing
from ntkfl.methods.statistics import answer, converse
from ntkfl.wire import Message

if TYPE_CHECKING:
    from ntkfl.engine.crowd import Crowd
    from ntkfl.engine.recording import Recorder


@dataclass
class Traffic:
    """Bytes of a round by direction and kind of message, rows dropped as bad, the seconds the clients took, and which
    clients failed, with the reason.
    """

    uplink: Counter[str] = field(default_factory=Counter)
    downlink: Counter[str] = field(default_factory=Counter)
    dropped: int = 0
    client_seconds: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)


class Carrier(Protocol):
    """Takes messages to the clients of a round, wherever they are, and brings their replies."""

    def ask(self, outgoing: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[bytes]:
        """Encoded replies, ordered by client; counts what it sends and who fails."""


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
    crowd = _crowd(number, [client.id for client in clients]) if method.shuffle else None

    def exchange(outgoing: Outgoing) -> list[Message]:
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
        return replies

    cohort = [client.id for client in clients]
    return hold(converse(method, task, state, number, cohort), exchange), traffic


def carry_round(
    task: Task, method: Method, state: State, number: int, cohort: Sequence[int], carrier: Carrier
) -> tuple[Outcome, Traffic]:
    """The same with clients that the carrier reaches; a shuffled method's shuffler is played here, as in a simulation.

    Who fails in one exchange of a round is not asked in the next.
    """
    traffic = Traffic()
    crowd = _crowd(number, cohort) if method.shuffle else None

    def exchange(outgoing: Outgoing) -> list[Message]:
        began = time.perf_counter()
        replies = carrier.ask(outgoing, cohort, traffic)
        traffic.client_seconds += time.perf_counter() - began
        if not crowd:
            return _received(replies, traffic)
        if len(replies) < len(cohort):
            raise TooFew(f"a simulated shuffler waits for its whole cohort; failed: {traffic.failed}")
        return _mixed(task, method, [Message.decode(reply) for reply in replies], crowd, traffic)

    return hold(converse(method, task, state, number, cohort), exchange), traffic


def hold(
    conversation: Generator[Outgoing, list[Message], Outcome], exchange: Callable[[Outgoing], list[Message]]
) -> Outcome:
    """Play a method's conversation to its end; `exchange` turns what the server says into what it hears."""
    outgoing = next(conversation)
    while True:
        try:
            outgoing = conversation.send(exchange(outgoing))
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome


def _ask(task: Task, method: Method, message: Message, clients: Sequence[Client], traffic: Traffic) -> list[Message]:
    payload = message.encode()
    traffic.downlink[message.kind] += len(payload) * len(clients)
    # All clients receive the same bytes, so decoding them once stands for each client's own decoding.
    return answer(method, task, Message.decode(payload), clients)


def _plain(answers: list[Message], traffic: Traffic) -> list[Message]:
    received = []
    while answers:  # each answer is let go as it is sent: uploads are large
        received += _received([answers.pop(0).encode()], traffic)
    return received


def _received(replies: list[bytes], traffic: Traffic) -> list[Message]:
    received = []
    while replies:
        reply = replies.pop(0)
        received.append(Message.decode(reply))
        traffic.uplink[received[-1].kind] += len(reply)
    return received


def _mixed(task: Task, method: Method, answers: Sequence[Message], crowd: Crowd, traffic: Traffic) -> list[Message]:
    received, sent = crowd.exchange(method, task, answers)
    traffic.uplink[answers[0].kind] += sent
    traffic.dropped += received.dropped
    if not received.replies:
        raise MessageError(f"none of the {received.dropped} rows of the round could be used")
    return received.replies


def _crowd(number: int, cohort: Sequence[int]) -> Crowd:
    from ntkfl.engine.crowd import Crowd  # sealing is an extra, and only shuffled runs need it

    return Crowd(number, cohort)
