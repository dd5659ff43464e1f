"""What went over the wire in one round, byte for byte, and who sent which row: for attacks and their scores.

A simulation plays all roles, so it can keep what no single role of a deployment knows: it keeps no secret anyway.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ntkfl.errors import MessageError
from ntkfl.methods import Method
from ntkfl.methods.base import Outgoing
from ntkfl.wire import Message


@dataclass(frozen=True)
class Exchange:
    """One question and its answers."""

    questions: tuple[bytes, ...]  # one for all, or one per client
    replies: tuple[bytes, ...]  # as the aggregator has them: one per client, or the joined rows
    senders: tuple[int, ...] | None  # shuffled: whose each row of the joined reply is
    samples: tuple[int, ...] | None  # and which of its sender's rows


@dataclass(frozen=True)
class Transcript:
    """A round's exchanges in their order."""

    round: int
    cohort: tuple[int, ...]
    exchanges: tuple[Exchange, ...]


class TranscriptRecorder:
    """Listens to a round as it is played."""

    def __init__(self, round: int, cohort: Sequence[int]) -> None:
        self.round, self.cohort = round, tuple(cohort)
        self._done: list[Exchange] = []
        self._sent: dict[bytes, list[tuple[int, int]]] = defaultdict(list)  # digest of a row -> who sent it, his n-th

    def asked(self, method: Method, outgoing: Outgoing, answers: Sequence[Message]) -> None:
        """Before the answers travel."""
        each = [outgoing] if isinstance(outgoing, Message) else [outgoing[i] for i in self.cohort]
        self._questions = tuple(message.encode() for message in each)
        self._shuffled = method.shuffle
        self._sent.clear()
        if self._shuffled:
            for client, answer in zip(self.cohort, answers, strict=True):
                for n, row in enumerate(method.split(answer)):
                    self._sent[hashlib.sha256(row.encode()).digest()].append((client, n))

    def answered(self, method: Method, replies: Sequence[Message]) -> None:
        """As the aggregator has them."""
        senders = samples = None
        if self._shuffled:
            received = [row for reply in replies for row in method.split(reply)]
            try:
                found = [self._sent[hashlib.sha256(row.encode()).digest()].pop() for row in received]
            except IndexError:
                raise MessageError("a row arrived that nobody sent") from None
            senders, samples = tuple(c for c, _ in found), tuple(n for _, n in found)
        encoded = tuple(reply.encode() for reply in replies)
        self._done.append(Exchange(self._questions, encoded, senders, samples))

    def transcript(self) -> Transcript:
        return Transcript(self.round, self.cohort, tuple(self._done))
