"""Replies without their senders: split into rows, sealed to the aggregator, shuffled, and opened.

Every client of an exchange sends equally many rows: who has fewer fills up with padding, which the aggregator alone can
tell once it has opened it. So no number of rows says how many samples a client has, and none gets more say by sending
more.

`seal_reply` is a client's side and `open_rows` the aggregator's; `ShuffledTransport` is what comes between.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ntkfl.crypto.hpke import SEAL_BYTES, SealingKey
from ntkfl.crypto.row_frames import Announced, open_row, pack_rows, seal_rows
from ntkfl.errors import ConfigError, MessageError, TrustError
from ntkfl.federation.secure_sum import SumSchema, open_sum
from ntkfl.federation.transport import Traffic, Transport
from ntkfl.federation.validation import MALFORMED
from ntkfl.methods import Method, Task
from ntkfl.methods.base import Outgoing
from ntkfl.methods.replies import Reply
from ntkfl.wire import Message
from ntkfl.wire.message import describes


@dataclass(frozen=True)
class Opened:
    """What of an exchange's rows could be read: messages of them, and rows dropped, by reason. `repeated` of the rows
    of samples equal others and are kept all the same.
    """

    messages: list[Message]
    rejected: Counter[str]
    repeated: int = 0


def seal_reply(
    reply: Reply, round: int, count: int, aggregator: bytes, federation: str, run: str, announced: Announced
) -> bytes:
    """A client's submission to the shuffler: its rows, filled up to `count`, each sealed to the aggregator."""
    encoded = [row.message(round).encode() for row in reply.split()]
    encoded += [bytes(len(encoded[0]))] * (count - len(encoded))
    return pack_rows(announced, seal_rows(encoded, aggregator, federation, run, announced))


def is_padding(plain: bytes) -> bool:
    """Whether an opened row is nothing but filling: zeros, which no message begins with."""
    return not any(plain)


@dataclass(frozen=True)
class RowSchema:
    """What every row of an exchange looks like: its header (kind, round; names, types and shapes of its arrays), and
    the bytes of those arrays that describe the network.
    """

    reply: type[Reply]
    header: bytes
    described: bytes
    sealed_bytes: int

    @staticmethod
    def of(reply: Reply, round: int) -> RowSchema:
        """From any honest reply, such as a blank one."""
        row = reply.split()[0].message(round)
        return RowSchema(type(reply), row.header(), _described(row), len(row.encode()) + SEAL_BYTES)

    @property
    def kind(self) -> str:
        return self.reply.kind

    def rows(self, of_samples: int) -> int:
        """How many rows every client sends, where it sends this many of samples."""
        return of_samples if self.reply.sampled else 1

    def read(self, plain: bytes) -> Message | None:
        """The row, if it looks as it should. Headers are compared as bytes before any array is made: hundreds of empty
        arrays fit where an honest row has ten, and each takes as long to make.
        """
        if not plain.startswith(self.header):
            return None
        try:
            row = Message.decode(plain)
        except MessageError:
            return None
        return row if _described(row) == self.described else None


def open_rows(
    sealed: Sequence[bytes],
    schema: RowSchema,
    opener: SealingKey,
    federation: str,
    run: str,
    announced: Announced,
) -> Opened:
    """The aggregator's side: rows that open, decode and have the right form, joined for validation. The others are
    counted and dropped; padding is dropped and not counted. What is left is put in the order of its bytes, so that the
    result does not depend on the shuffler's.

    Honest seals are all different: one that comes twice was copied. Equal rows of samples under different seals are a
    client's that sealed one twice, or honest: records that repeat, and samples for which all units of a small network
    are dead. Nothing tells them apart, so they are counted and kept.
    """
    rejected: Counter[str] = Counter()
    opened = []
    for row in set(sealed):
        try:
            plain = open_row(opener, row, federation, run, announced)
            opened += [] if is_padding(plain) else [plain]
        except TrustError:
            rejected["not for this batch"] += 1
    rejected["copied"] = len(sealed) - len(set(sealed))
    repeated = len(opened) - len(set(opened)) if schema.reply.sampled else 0
    rows = []
    for plain in sorted(opened):
        if (message := schema.read(plain)) is not None:
            rows.append(message)
        else:
            rejected[MALFORMED] += 1
    joined = schema.reply.join([schema.reply(row.arrays, row.halves) for row in rows])
    return Opened([reply.message(announced.key.round) for reply in joined], +rejected, repeated)


def _described(row: Message) -> bytes:
    """Of rows with one header, these bytes are of one length: equal ones mean equal arrays."""
    return b"".join(a.numpy().tobytes() for name, a in row.arrays.items() if describes(name))


@dataclass(frozen=True)
class Mixed:
    """What a shuffler released of an exchange: sealed rows in random order, what they should look like, the
    announcement that they answer, the bytes that clients sent, and of a secure sum the sum of the masks.
    """

    rows: list[bytes]
    schema: RowSchema | SumSchema
    announced: Announced
    sent: int
    masks: bytes = b""


class ShuffledTransport(Transport):
    """Seal, mix, open: around any shuffler, which a subclass reaches in `mix`. Rows are sealed to a key that is made
    for one round, held in memory, and dropped with it.
    """

    anonymous = True

    def __init__(self, task: Task, method: Method, federation: str, run: str) -> None:
        self.task, self.method, self.federation, self.run = task, method, federation, run
        self.opener = SealingKey.generate()
        self._summed: dict[str, Any] = {}  # of the round's secure sum, for its record

    @abstractmethod
    def mix(self, question: Message, cohort: Sequence[int], traffic: Traffic) -> Mixed:
        """The clients' rows in answer to the question, sealed to `opener`'s public key, as the shuffler gives them."""

    def schema(self, question: Message, clients: int) -> RowSchema | SumSchema:
        """What every client's submission in answer to the question looks like, known before any of them answers."""
        blank = self.method.replies[question.kind].blank(self.method, self.task, question)
        if self.task.privacy.secure_sum:
            return SumSchema.of(blank.kind, blank.addends(self.method, self.task, question), clients)
        return RowSchema.of(blank, question.round)

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        self.opener, self._summed = SealingKey.generate(), {}

    def end(self) -> None:
        self.opener = SealingKey.generate()  # nothing opens the round's rows any more

    def exchange(self, question: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[Message]:
        if not isinstance(question, Message):
            raise ConfigError(f"{self.method.name} tells clients apart, which the shuffler is there to prevent")
        mixed = self.mix(question, cohort, traffic)
        traffic.uplink[mixed.schema.kind] += mixed.sent
        where = (self.opener, self.federation, self.run, mixed.announced)
        if isinstance(mixed.schema, SumSchema):
            arrays, bounded = open_sum(mixed.schema, mixed.rows, mixed.masks, *where)
            self._summed = {"summed_clients": len(mixed.rows), "bounded_clients": bounded}
            kind = self.method.replies[question.kind]
            whole = kind.from_total(self.method, self.task, question, arrays, len(mixed.rows))
            return [whole.message(question.round)]
        opened = open_rows(mixed.rows, mixed.schema, *where)
        traffic.rejected += opened.rejected
        if MALFORMED in opened.rejected:
            traffic.reasons.setdefault(MALFORMED, "rows of another form than this round's")
        traffic.repeated += opened.repeated
        return opened.messages

    def notes(self, cohort: Sequence[int]) -> dict[str, Any]:
        return self._summed
