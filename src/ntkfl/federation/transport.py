"""One round: the method's conversation, held with clients in this process or by whoever carries messages to others.

In this process too every message is encoded, counted and decoded, as if it crossed a network.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ntkfl.errors import Diverged, MessageError, TooFew
from ntkfl.federation.validation import MALFORMED, NOT_FINITE, filter_replies
from ntkfl.methods import ClientRound, Method, Outcome, State, Task
from ntkfl.methods.base import Outgoing
from ntkfl.methods.batchnorm import answer, converse
from ntkfl.wire import Message

if TYPE_CHECKING:
    from ntkfl.federation.shuffled import LocalShuffler
    from ntkfl.federation.transcript import TranscriptRecorder


@dataclass
class Traffic:
    """Bytes of a round by direction and kind of message, rows (of averaging methods, replies) that were rejected by
    why, replies that lost some where their senders are known, shuffled rows that equal others, the seconds the clients
    took, and which clients failed, with the reason.
    """

    uplink: Counter[str] = field(default_factory=Counter)
    downlink: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    rejected_clients: int = 0
    repeated: int = 0
    client_seconds: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def dropped(self) -> int:
        return self.rejected.total()


Answer = Callable[[Method, Task, Message, Sequence[ClientRound]], list[Message]]


class Carrier(Protocol):
    """Takes messages to the clients of a round, wherever they are, and brings their replies."""

    quorum: int  # clients without whose replies a round is not built

    def ask(self, outgoing: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[bytes]:
        """Encoded replies, ordered by client; counts what it sends and who fails."""


def play_round(
    task: Task,
    method: Method,
    state: State,
    number: int,
    clients: Sequence[ClientRound],
    recorder: TranscriptRecorder | None = None,
    answer: Answer = answer,
    rows: int | None = None,
) -> tuple[Outcome, Traffic]:
    """Run the method's conversation with `clients` (ordered by id) to its end; `recorder` hears all of it.

    `answer` is how clients do, where some of them lie. `rows` of samples is what each sends through a shuffler: if not
    given, as many as the largest has.
    """
    traffic = Traffic()
    rows = rows or max(len(client) for client in clients)
    crowd = _crowd(number, [client.id for client in clients], rows) if method.shuffle else None

    def exchange(outgoing: Outgoing) -> list[Message]:
        began = time.perf_counter()
        if isinstance(outgoing, Message):
            answers = _ask(task, method, outgoing, clients, traffic, answer)
        else:
            each = [(outgoing[client.id], client) for client in clients]
            answers = [reply for m, client in each for reply in _ask(task, method, m, [client], traffic, answer)]
        traffic.client_seconds += time.perf_counter() - began
        if recorder:
            recorder.asked(method, outgoing, answers, rows)
        replies = _mixed(task, method, answers, crowd, traffic) if crowd else _plain(task, method, answers, traffic)
        if recorder:
            recorder.answered(method, replies)
        return replies

    cohort = [client.id for client in clients]
    return hold(converse(method, task, state, number, cohort), exchange), traffic


def carry_round(
    task: Task, method: Method, state: State, number: int, cohort: Sequence[int], carrier: Carrier, rows: int = 1
) -> tuple[Outcome, Traffic]:
    """The same with clients that the carrier reaches; a shuffled method's shuffler is played here, as in a simulation.

    Who fails in one exchange of a round is not asked in the next.
    """
    traffic = Traffic()
    crowd = _crowd(number, cohort, rows) if method.shuffle else None

    def exchange(outgoing: Outgoing) -> list[Message]:
        began = time.perf_counter()
        replies = carrier.ask(outgoing, cohort, traffic)
        traffic.client_seconds += time.perf_counter() - began
        if not crowd:
            return _usable(task, method, _received(replies, traffic), traffic, carrier.quorum)
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


def _ask(
    task: Task, method: Method, message: Message, clients: Sequence[ClientRound], traffic: Traffic, answer: Answer
) -> list[Message]:
    payload = message.encode()
    traffic.downlink[message.kind] += len(payload) * len(clients)
    # All clients receive the same bytes, so decoding them once stands for each client's own decoding.
    return answer(method, task, Message.decode(payload), clients)


def _plain(task: Task, method: Method, answers: list[Message], traffic: Traffic) -> list[Message]:
    received = []
    while answers:  # each answer is let go as it is sent: uploads are large
        received += _received([answers.pop(0).encode()], traffic)
    return _usable(task, method, received, traffic)


def _received(replies: list[bytes], traffic: Traffic) -> list[Message]:
    received = []
    while replies:
        reply = replies.pop(0)
        try:
            received.append(Message.decode(reply))
            traffic.uplink[received[-1].kind] += len(reply)
        except MessageError:
            traffic.rejected[MALFORMED] += 1
            traffic.rejected_clients += 1
    return received


def _usable(task: Task, method: Method, replies: list[Message], traffic: Traffic, least: int = 1) -> list[Message]:
    """The replies without the rows, or without the clients, that a round cannot be built from."""
    sifted = filter_replies(method, task, replies)
    traffic.rejected += sifted.rejected
    traffic.rejected_clients += sifted.touched
    if not sifted.replies:
        kind = Diverged if set(sifted.rejected) == {NOT_FINITE} else TooFew
        raise kind(f"nothing that clients sent could be used: {why_rejected(traffic.rejected)}")
    if len(sifted.replies) < least:
        why = why_rejected(traffic.rejected)
        raise TooFew(f"{len(sifted.replies)} replies could be used, below the quorum of {least}: {why}")
    return sifted.replies


def why_rejected(rejected: Mapping[str, int]) -> str:
    """Counts by reason in words."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(rejected.items())) or "nothing came"


def _mixed(
    task: Task, method: Method, answers: Sequence[Message], crowd: LocalShuffler, traffic: Traffic
) -> list[Message]:
    received, sent = crowd.exchange(method, task, answers)
    traffic.uplink[answers[0].kind] += sent
    traffic.rejected += received.rejected
    traffic.repeated += received.repeated
    if not received.replies:
        raise TooFew(f"nothing that clients sent could be used: {why_rejected(traffic.rejected)}")
    return received.replies


def _crowd(number: int, cohort: Sequence[int], rows: int) -> LocalShuffler:
    from ntkfl.federation.shuffled import LocalShuffler  # sealing is an extra, and only shuffled runs need it

    return LocalShuffler(number, cohort, rows)
