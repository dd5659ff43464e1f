"""Replies as a crowd's: split into rows, sealed to the aggregator, shuffled, opened, and sifted.

Every client of an exchange sends equally many rows: who has fewer fills up with padding, which the aggregator alone can
tell once it has opened it. So no number of rows says how many samples a client has, and none gets more say by sending
more.

`send` is a client's side and `receive` the aggregator's, wherever they run; `Crowd` plays all roles in this process
with the shuffler's own code, so that simulated bytes are real bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from ntkfl.engine.sifting import MALFORMED, Sifted, sift
from ntkfl.errors import ConfigError, MessageError, NTKFLError, Refused, TooFew, TrustError
from ntkfl.methods import Method, Task
from ntkfl.privacy.batches import Batch
from ntkfl.privacy.rows import BatchKey, open_row, pack_rows, seal_rows, unpack_rows
from ntkfl.privacy.sealing import SEAL_BYTES, SealingKey
from ntkfl.privacy.shuffling import Shuffler
from ntkfl.wire import Message
from ntkfl.wire.message import describes

LEAST_CLIENTS = 2  # without whose rows a simulated batch is not released: a deployed shuffler's least


@dataclass(frozen=True)
class Received:
    """What an exchange gave: replies the method's round can use, how many rows they are, and rows dropped, by why."""

    replies: list[Message]
    rows: int
    rejected: Counter[str]

    @property
    def dropped(self) -> int:
        return self.rejected.total()


def send(
    method: Method, reply: Message, count: int, aggregator: bytes, federation: str, run: str, key: BatchKey
) -> bytes:
    """A client's submission to the shuffler: its rows, filled up to `count`, each sealed to the aggregator."""
    return send_rows(method.split(reply), count, aggregator, federation, run, key)


def send_rows(
    rows: Sequence[Message], count: int, aggregator: bytes, federation: str, run: str, key: BatchKey
) -> bytes:
    """The same of rows."""
    encoded = [row.encode() for row in rows]
    encoded += [bytes(len(encoded[0]))] * (count - len(encoded))
    return pack_rows(key, seal_rows(encoded, aggregator, federation, run, key))


def is_padding(plain: bytes) -> bool:
    """Whether an opened row is nothing but filling: zeros, which no message begins with."""
    return not any(plain)


@dataclass(frozen=True)
class Template:
    """What every row of an exchange looks like: its arrays' names, types and shapes, and what describes the network."""

    form: Hashable
    sealed_bytes: int
    sampled: bool  # a row a sample, rather than one a client

    @staticmethod
    def of(method: Method, reply: Message) -> Template:
        """From any honest reply, such as one to made-up data."""
        row = method.split(reply)[0]
        return Template(_form(row), len(row.encode()) + SEAL_BYTES, reply.kind in method.sampled)

    def rows(self, of_samples: int) -> int:
        """How many rows every client sends, where it sends this many of samples."""
        return of_samples if self.sampled else 1


def receive(
    method: Method,
    task: Task,
    sealed: Sequence[bytes],
    template: Template,
    opener: SealingKey,
    federation: str,
    run: str,
    key: BatchKey,
) -> Received:
    """The aggregator's side: rows that open, decode, have the right form, pass the method's checks and are not extreme.
    The others are counted and dropped; padding is dropped and not counted. What is left is put in the order of its
    bytes, so that the result does not depend on the shuffler's.
    """
    rejected: Counter[str] = Counter()
    opened = []
    for row in set(sealed):  # honest seals are all different: a row that comes twice was copied
        try:
            opened.append(open_row(opener, row, federation, run, key))
        except TrustError:
            rejected["not for this batch"] += 1
    rejected["copied"] = len(sealed) - len(set(sealed))
    rows = []
    for plain in sorted(plain for plain in opened if not is_padding(plain)):
        try:
            message = Message.decode(plain)
        except MessageError:
            message = None
        if message is not None and message.round == key.round and _form(message) == template.form:
            rows.append(message)
        else:
            rejected[MALFORMED] += 1
    sifted = sift(method, task, method.join(rows)) if rows else Sifted()
    return Received(sifted.replies, sifted.rows, +(rejected + sifted.rejected))


def _form(row: Message) -> Hashable:
    described = ((a.numpy().tobytes() if describes(name) else b"") for name, a in row.arrays.items())
    arrays = tuple((name, a.dtype, tuple(a.shape)) for name, a in row.arrays.items())
    return (row.kind, arrays, tuple(described))


class Crowd:
    """The shuffled exchanges of a simulated round, in which every client sends `rows` rows of samples."""

    def __init__(self, round: int, clients: Sequence[int], rows: int) -> None:
        if len(clients) < LEAST_CLIENTS:
            raise ConfigError(f"a shuffler needs a crowd: at least {LEAST_CLIENTS} clients a round")
        self.names = tuple(f"client-{i}" for i in clients)
        self.round, self.rows, self.exchanges = round, rows, 0
        self.federation, self.run = "simulation", "simulation"
        self.opener = SealingKey.generate()
        self.shuffler = Shuffler(floor=LEAST_CLIENTS, clock=lambda: 0.0)  # a batch is due when all have had their turn

    def exchange(self, method: Method, task: Task, answers: Sequence[Message]) -> tuple[Received, int]:
        """(what the aggregator receives, the bytes clients sent). Who sends rows that the shuffler refuses loses them,
        and is not waited for.
        """
        key = BatchKey(self.round, 0, self.exchanges)
        self.exchanges += 1
        template = _template(method, task, answers)
        count, where = template.rows(self.rows), (self.opener.public, self.federation, self.run, key)
        bodies = [send(method, answer, count, *where) for answer in answers]
        rows = [unpack_rows(body)[1] for body in bodies]
        self.shuffler.open(Batch(key, self.names, count, template.sealed_bytes, LEAST_CLIENTS, seconds=0))
        refused: Counter[str] = Counter()
        for name, own, answer in zip(self.names, rows, answers, strict=True):
            try:
                self.shuffler.submit(name, key, own)
            except Refused:
                refused[MALFORMED] += len(method.split(answer))
        if (there := self.shuffler.status(key).clients) < LEAST_CLIENTS:
            self.shuffler.cancel(key)
            why = f"{refused[MALFORMED]} rows were {MALFORMED}"
            raise TooFew(f"{there} clients' rows were taken, too few for the shuffler to release them: {why}")
        sealed = self.shuffler.release(key)
        self.shuffler.forget(key)
        received = receive(method, task, sealed, template, self.opener, self.federation, self.run, key)
        return replace(received, rejected=received.rejected + refused), sum(map(len, bodies))


def _template(method: Method, task: Task, answers: Sequence[Message]) -> Template:
    """The honest one, without the samples an aggregator makes up for it: the commonest that the method can read."""
    seen = [(Template.of(method, answer), answer) for answer in answers]
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
