"""Replies as a crowd's: split into rows, sealed to the aggregator, shuffled, opened, and sifted.

Every client of an exchange sends equally many rows: who has fewer fills up with padding, which the aggregator alone can
tell once it has opened it. So no number of rows says how many samples a client has, and none gets more say by sending
more.

`seal_reply` is a client's side and `open_rows` the aggregator's, wherever they run; `LocalShuffler` plays all roles in
this process with the shuffler's own code, so that simulated bytes are real bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ntkfl.crypto.context import bind
from ntkfl.crypto.hpke import SEAL_BYTES, SealingKey
from ntkfl.crypto.row_frames import Announced, BatchKey, open_row, pack_rows, seal_rows, unpack_rows
from ntkfl.errors import ConfigError, MessageError, NTKFLError, Refused, TooFew, TrustError
from ntkfl.federation.validation import MALFORMED, Filtered, filter_replies
from ntkfl.methods import Method, Task
from ntkfl.services.shuffler.batch import Batch
from ntkfl.services.shuffler.store import Shuffler
from ntkfl.wire import Message
from ntkfl.wire.message import describes

LEAST_CLIENTS = 2  # without whose rows a simulated batch is not released: a deployed shuffler's least


@dataclass(frozen=True)
class Received:
    """What an exchange gave: replies the method's round can use, how many rows they are, and rows dropped, by why.
    `repeated` of the rows of samples equal others and are kept all the same.
    """

    replies: list[Message]
    rows: int
    rejected: Counter[str]
    repeated: int = 0

    @property
    def dropped(self) -> int:
        return self.rejected.total()


def seal_reply(
    method: Method, reply: Message, count: int, aggregator: bytes, federation: str, run: str, announced: Announced
) -> bytes:
    """A client's submission to the shuffler: its rows, filled up to `count`, each sealed to the aggregator."""
    return seal_messages(method.split(reply), count, aggregator, federation, run, announced)


def seal_messages(
    rows: Sequence[Message], count: int, aggregator: bytes, federation: str, run: str, announced: Announced
) -> bytes:
    """The same of rows."""
    encoded = [row.encode() for row in rows]
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

    kind: str
    header: bytes
    described: bytes
    sealed_bytes: int
    sampled: bool  # one row per sample, rather than one per client

    @staticmethod
    def of(method: Method, reply: Message) -> RowSchema:
        """From any honest reply, such as one to made-up data."""
        row = method.split(reply)[0]
        sampled = reply.kind in method.sampled
        return RowSchema(row.kind, row.header(), _described(row), len(row.encode()) + SEAL_BYTES, sampled)

    def rows(self, of_samples: int) -> int:
        """How many rows every client sends, where it sends this many of samples."""
        return of_samples if self.sampled else 1

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
    method: Method,
    task: Task,
    sealed: Sequence[bytes],
    template: RowSchema,
    opener: SealingKey,
    federation: str,
    run: str,
    announced: Announced,
) -> Received:
    """The aggregator's side: rows that open, decode, have the right form, pass the method's checks and are not extreme.
    The others are counted and dropped; padding is dropped and not counted. What is left is put in the order of its
    bytes, so that the result does not depend on the shuffler's.

    Honest seals are all different: one that comes twice was copied. Equal rows of samples under different seals are a
    client's that sealed one twice, or honest: records that repeat, and samples for which all units of a small network
    are dead. Nothing tells them apart, so they are counted, and dropped where the method says that rows are distinct.
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
    repeated = len(opened) - len(set(opened)) if template.sampled else 0
    if repeated and method.distinct_rows:
        rejected["copied"] += repeated
        opened, repeated = list(set(opened)), 0
    rows = []
    for plain in sorted(opened):
        if (message := template.read(plain)) is not None:
            rows.append(message)
        else:
            rejected[MALFORMED] += 1
    sifted = filter_replies(method, task, method.join(rows)) if rows else Filtered()
    return Received(sifted.replies, sifted.rows, +(rejected + sifted.rejected), repeated)


def _described(row: Message) -> bytes:
    """Of rows with one header, these bytes are of one length: equal ones mean equal arrays."""
    return b"".join(a.numpy().tobytes() for name, a in row.arrays.items() if describes(name))


class LocalShuffler:
    """The shuffled exchanges of a simulated round, in which every client sends `rows` rows of samples."""

    def __init__(self, round: int, clients: Sequence[int], rows: int) -> None:
        if len(clients) < LEAST_CLIENTS:
            raise ConfigError(f"a shuffler needs a crowd: at least {LEAST_CLIENTS} clients a round")
        self.names = tuple(f"client-{i}" for i in clients)
        self.round, self.rows, self.exchanges = round, rows, 0
        self.federation, self.run = "simulation", "simulation"
        self.opener = SealingKey.generate()
        self.there = frozenset(self.names)  # whose rows the shuffler took in the first exchange
        self.shuffler = Shuffler(floor=LEAST_CLIENTS, clock=lambda: 0.0)  # a batch is due when all have had their turn

    def exchange(self, method: Method, task: Task, answers: Sequence[Message]) -> tuple[Received, int]:
        """(what the aggregator receives, the bytes clients sent). Who sends rows that the shuffler refuses in the first
        exchange loses them, and is as if absent; in a later one the round fails, as a shuffler then releases nothing.
        """
        key = BatchKey(self.round, self.exchanges)
        announced = Announced.of(key, bind("simulation", *key))  # in the place of an announcement's digest
        self.exchanges += 1
        own = {name: answer for name, answer in zip(self.names, answers, strict=True) if name in self.there}
        template = _template(method, task, list(own.values()))
        count, where = template.rows(self.rows), (self.opener.public, self.federation, self.run, announced)
        bodies = {name: seal_reply(method, answer, count, *where) for name, answer in own.items()}
        rows = {name: unpack_rows(body)[1] for name, body in bodies.items()}
        batch = Batch(key, self.names, count, template.sealed_bytes, LEAST_CLIENTS, seconds=0)
        self.shuffler.open(batch, announced.digest)
        refused: Counter[str] = Counter()
        taken = set()
        for name, sent in rows.items():
            try:
                self.shuffler.submit(name, announced, sent)
                taken.add(name)
            except Refused:
                refused[MALFORMED] += len(method.split(own[name]))
        self.there = frozenset(taken) if key.exchange == 0 else self.there
        if len(taken) < LEAST_CLIENTS or taken != self.there:
            self.shuffler.cancel(key)
            why = f"{refused[MALFORMED]} rows were {MALFORMED}"
            raise TooFew(f"{len(taken)} clients' rows were taken, too few for the shuffler to release them: {why}")
        sealed = self.shuffler.release(key)
        self.shuffler.forget(key)
        received = open_rows(method, task, sealed, template, self.opener, self.federation, self.run, announced)
        return replace(received, rejected=received.rejected + refused), sum(map(len, bodies.values()))


def _template(method: Method, task: Task, answers: Sequence[Message]) -> RowSchema:
    """The honest one, without the samples an aggregator makes up for it: the commonest that the method can read."""
    seen = [(RowSchema.of(method, answer), answer) for answer in answers]
    templates = [template for template, _ in Counter(template for template, _ in seen).most_common()]
    for template in templates if len(templates) > 1 else ():
        if any(_readable(method, task, answer) for own, answer in seen if own == template):
            return template
    return templates[0]


def _readable(method: Method, task: Task, answer: Message) -> bool:
    try:
        method.check(task, answer)
    except NTKFLError:
        return False
    return True
