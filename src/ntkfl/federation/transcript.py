"""What went over the wire in one round, byte for byte, and who sent which row: for attacks and their scores.

A simulation plays all roles, so it can keep what no single role of a deployment knows: it keeps no secret anyway.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ntkfl.errors import MessageError
from ntkfl.methods import Method
from ntkfl.methods.base import Outgoing
from ntkfl.methods.replies import Reply
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


OnTranscript = Callable[[Transcript], None]


class TranscriptRecorder:
    """Listens to a round as it is played: `asked`, `sent` by every client, `answered`, for each exchange."""

    def __init__(self, round: int, cohort: Sequence[int], shuffled: bool) -> None:
        self.round, self.cohort, self.shuffled = round, tuple(cohort), shuffled
        self._done: list[Exchange] = []
        self._sent: dict[bytes, list[tuple[int, int]]] = defaultdict(list)  # digest of a row -> who sent it, its n-th

    def asked(self, question: Outgoing) -> None:
        each = [question] if isinstance(question, Message) else [question[i] for i in self.cohort]
        self._questions = tuple(message.encode() for message in each)
        self._sent.clear()

    def sent(self, method: Method, asked: str, client: int, message: Message) -> None:
        """Before a client's reply to the question of kind `asked` travels."""
        if self.shuffled:
            for n, row in enumerate(method.replies[asked](message.arrays, message.halves).split()):
                self._sent[self._digest(row)].append((client, n))

    def answered(self, replies: Sequence[Reply]) -> None:
        """As the aggregator has them."""
        senders = samples = None
        if self.shuffled:
            try:
                found = [self._sent[self._digest(row)].pop() for reply in replies for row in reply.split()]
            except IndexError:
                raise MessageError("a row arrived that nobody sent") from None
            senders, samples = tuple(c for c, _ in found), tuple(n for _, n in found)
        encoded = tuple(reply.message(self.round).encode() for reply in replies)
        self._done.append(Exchange(self._questions, encoded, senders, samples))

    def _digest(self, row: Reply) -> bytes:
        return hashlib.sha256(row.message(self.round).encode()).digest()

    def transcript(self) -> Transcript:
        return Transcript(self.round, self.cohort, tuple(self._done))
