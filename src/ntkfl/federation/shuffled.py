"""Replies without their senders: split into rows, sealed to the aggregator, shuffled, and opened.

Every client of an exchange sends equally many rows: who has fewer fills up with padding, which the aggregator alone can
tell once it has opened it. So no number of rows says how many samples a client has, and none gets more say by sending
more.

`seal_reply` is a client's side and `open_rows` the aggregator's; `ShuffledTransport` is what comes between, and
`LocalShuffler` all of it in one process.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ntkfl.crypto.context import bind
from ntkfl.crypto.hpke import SEAL_BYTES, SealingKey
from ntkfl.crypto.row_frames import SEED_BYTES, Announced, BatchKey, open_row, pack_rows, seal_rows, unpack_rows
from ntkfl.errors import ConfigError, MessageError, NTKFLError, TooFew, TrustError
from ntkfl.federation.secure_sum import SumSchema, mask_reply, open_sum
from ntkfl.federation.transport import Traffic, Transport
from ntkfl.federation.validation import MALFORMED, rows_of
from ntkfl.methods import Method, State, Task
from ntkfl.methods.base import Outgoing
from ntkfl.methods.replies import Reply
from ntkfl.privacy.randomness import Randomness
from ntkfl.services.announcement import Batch
from ntkfl.services.store import BatchStore
from ntkfl.wire import Message
from ntkfl.wire.message import describes


def seal_reply(
    reply: Reply, round: int, count: int, aggregator: bytes, federation: str, run: str, announced: Announced
) -> bytes:
    """A client's submission to the shuffler: its rows, filled up to `count`, each sealed to the aggregator."""
    encoded = [row.message(round).encode() for row in reply.split()]
    encoded += [bytes(len(encoded[0]))] * (count - len(encoded))
    return pack_rows(announced, seal_rows(encoded, aggregator, federation, run, announced))


@dataclass(frozen=True)
class RowSchema:
    """What every row of an exchange looks like: its header (kind, round; names, types and shapes of its arrays), and
    the bytes of those arrays that describe the network.
    """

    reply: type[Reply]
    header: bytes
    described: bytes
    sealed_bytes: int
    numbers: ClassVar[int] = 0  # that are summed under masks

    @staticmethod
    def of(reply: Reply, round: int) -> RowSchema:
        """From any honest reply, such as a blank one."""
        row = reply.split()[0].message(round)
        return RowSchema(type(reply), row.header(), _described(row), len(row.encode()) + SEAL_BYTES)

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
    traffic: Traffic,
) -> list[Message]:
    """The aggregator's side: rows that open, decode and have the right form, joined into messages for validation, in
    the order of their bytes, so that the result does not depend on the shuffler's. The others are dropped and counted;
    padding is dropped and not counted.

    Honest seals are all different: one that comes twice was copied. Equal rows of samples under different seals are a
    client's that sealed one twice, or honest: records that repeat, and samples for which all units of a small network
    are dead. Nothing tells them apart, so they are counted and kept.
    """
    opened, rows, seals = list[bytes](), list[Reply](), set(sealed)
    traffic.rejected += Counter({"copied": len(sealed) - len(seals)})
    for row in seals:
        try:
            plain = open_row(opener, row, federation, run, announced)
            opened += [plain] if any(plain) else []  # padding is zeros, which no message begins with
        except TrustError:
            traffic.rejected["not for this batch"] += 1
    if schema.reply.sampled:
        traffic.repeated += len(opened) - len(set(opened))
    for plain in sorted(opened):
        if (message := schema.read(plain)) is not None:
            rows.append(schema.reply(message.arrays, message.halves))
        else:
            traffic.reject(MALFORMED, 1, "rows of another form than this round's")
    return [reply.message(announced.key.round) for reply in schema.reply.join(rows)]


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
    """Seal, mix, open: around any shuffler, which a subclass reaches in `mix`, before the clients that `inner` reaches.
    Rows are sealed to a key that is made for one round, held in memory, and dropped with it.
    """

    anonymous = True

    def __init__(self, inner: Transport, task: Task, method: Method, federation: str, run: str) -> None:
        self.inner, self.task, self.method, self.federation, self.run = inner, task, method, federation, run
        self.opener = SealingKey.generate()
        self.key, self.present = BatchKey(0, 0), list[int]()  # of the round's next exchange; clients that have answered
        self._summed: dict[str, Any] = {}  # of the round's secure sum, for its record

    @abstractmethod
    def mix(self, key: BatchKey, question: Message, cohort: Sequence[int], traffic: Traffic) -> Mixed:
        """The clients' rows in answer to the question, sealed to `opener`'s public key, as the shuffler gives them."""

    def schema(self, question: Message, clients: int) -> RowSchema | SumSchema:
        """What every client's submission in answer to the question looks like, known before any of them answers."""
        blank = self.method.replies[question.kind].blank(self.method, self.task, question)
        if self.task.privacy.secure_sum:
            return SumSchema.of(blank.addends(self.method, self.task, question), clients)
        return RowSchema.of(blank, question.round)

    def available(self) -> Sequence[int]:
        """The clients behind the shuffler."""
        return self.inner.available()

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        """With a new key, so that rows of another round cannot be opened in this one."""
        self.opener, self._summed = SealingKey.generate(), {}
        self.key, self.present = BatchKey(round, 0), list(cohort)
        self.inner.begin(round, cohort)

    def end(self) -> None:
        self.opener = SealingKey.generate()  # nothing opens the round's rows any more
        self.inner.end()

    def checkpoint(self) -> State:
        return self.inner.checkpoint()

    def restore(self, tensors: State) -> None:
        self.inner.restore(tensors)

    def exchange(self, question: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[Message]:
        """The rows that could be opened, joined into messages; or the one reply that a secure sum's total makes."""
        if not isinstance(question, Message):
            raise ConfigError(f"{self.method.name} tells clients apart, which the shuffler is there to prevent")
        key, self.key = self.key, BatchKey(self.key.round, self.key.exchange + 1)
        mixed = self.mix(key, question, cohort, traffic)
        traffic.uplink[self.method.replies[question.kind].kind] += mixed.sent
        where = (self.opener, self.federation, self.run, mixed.announced)
        if isinstance(mixed.schema, SumSchema):
            arrays, bounded = open_sum(mixed.schema, mixed.rows, mixed.masks, *where)
            self._summed = {"summed_clients": len(mixed.rows), "bounded_clients": bounded}
            kind = self.method.replies[question.kind]
            whole = kind.from_total(self.method, self.task, question, arrays, len(mixed.rows))
            return [whole.message(question.round)]
        return open_rows(mixed.rows, mixed.schema, *where, traffic)

    def notes(self, cohort: Sequence[int]) -> dict[str, Any]:
        """Of a secure sum: how many clients it is of, and how many scaled something down to its limit."""
        return self._summed | self.inner.notes(cohort)


LEAST_CLIENTS = 2  # without whose rows a simulated batch is not released: a deployed shuffler's least


class LocalShuffler(ShuffledTransport):
    """A shuffler in this process, with the shuffler's own code: simulated bytes are real bytes.

    It stands between the server and the clients that `inner` reaches, each of which sends `rows` rows of samples, and
    plays the clients' sealing, the shuffler and the aggregator.
    """

    floor = LEAST_CLIENTS

    def __init__(self, inner: Transport, task: Task, method: Method, rows: int, seed: int = 0) -> None:
        super().__init__(inner, task, method, "simulation", "simulation")
        self.rows, self.seed = rows, seed
        self._shuffler = BatchStore(floor=LEAST_CLIENTS)

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        """A new key and an empty shuffler; `ConfigError` for a cohort in which nobody could hide."""
        if len(cohort) < LEAST_CLIENTS:
            raise ConfigError(
                f"a shuffler hides nobody among {len(cohort)}: at least {LEAST_CLIENTS} clients per round are needed"
            )
        super().begin(round, cohort)
        self._shuffler = BatchStore(floor=LEAST_CLIENTS)

    def mix(self, key: BatchKey, question: Message, cohort: Sequence[int], traffic: Traffic) -> Mixed:
        """A client whose rows the shuffler refuses in the first exchange loses them, and is as if absent; in a later
        one the round fails, as a shuffler then releases nothing.
        """
        sent = Traffic()  # bytes up are counted once replies are sealed
        messages = self.inner.exchange(question, cohort, sent)
        traffic.downlink += sent.downlink
        traffic.client_seconds += sent.client_seconds
        announced = Announced.of(key, bind("simulation", *key))  # in the place of an announcement's digest
        schema = self.schema(question, len(cohort))
        sizes = schema.rows(self.rows), schema.sealed_bytes, LEAST_CLIENTS, schema.numbers
        self._shuffler.open(Batch(key, len(cohort), *sizes), announced.digest)
        kind, taken, size = self.method.replies[question.kind], list[int](), 0
        for number, message in zip(cohort, messages, strict=True):
            if number not in self.present:
                continue
            reply = kind(message.arrays, message.halves)
            try:
                body = self._sealed(number, reply, question, schema, announced)
                seed = body[:SEED_BYTES] if schema.numbers else b""
                self._shuffler.submit(str(number), announced, unpack_rows(body[len(seed) :])[1], seed or None)
                taken.append(number)
                size += len(body)
            except NTKFLError:  # a reply that does not split or sum as it should, or that the shuffler refuses
                rows_lost = len(rows_of(kind, message))
                traffic.reject(MALFORMED, rows_lost, "arrays of other names, types or shapes than this round's")
        self.present = taken if key.exchange == 0 else self.present
        if len(taken) < LEAST_CLIENTS or taken != self.present:
            self._shuffler.discard(key)
            why = f"{traffic.rejected[MALFORMED]} rows were {MALFORMED} ({traffic.reasons.get(MALFORMED, 'none came')})"
            raise TooFew(
                f"the shuffler releases nothing: it could take rows of {len(taken)} of {len(cohort)} clients; {why}"
            )
        _, sealed, masks = self._shuffler.release(key)
        self._shuffler.discard(key)
        return Mixed(sealed, schema, announced, size, masks)

    def _sealed(
        self, number: int, reply: Reply, question: Message, schema: RowSchema | SumSchema, announced: Announced
    ) -> bytes:
        """What the client submits; an `NTKFLError` where it cannot comply."""
        where = (self.opener.public, self.federation, self.run, announced)
        if isinstance(schema, RowSchema):
            return seal_reply(reply, question.round, schema.rows(self.rows), *where)
        addends = reply.addends(self.method, self.task, question)
        if SumSchema.of(addends, schema.clients) != schema:
            raise MessageError("a summand of another form than this round's")
        draws = Randomness.simulated(self.seed, "client", number, question.round)
        return mask_reply(schema.encode(addends, draws), *where)
