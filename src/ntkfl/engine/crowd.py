"""Replies as a crowd's: split into rows, sealed to the aggregator, shuffled, opened, and sifted.

`send` is a client's side and `receive` the aggregator's, wherever they run; `Crowd` plays all roles in this process
with the shuffler's own code, so that simulated bytes are real bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ntkfl.engine.sifting import MALFORMED, Sifted, sift
from ntkfl.errors import ConfigError, MessageError, TrustError
from ntkfl.methods import Method, Task
from ntkfl.privacy.batches import Batch
from ntkfl.privacy.rows import BatchKey, open_row, pack_rows, seal_rows, unpack_rows
from ntkfl.privacy.sealing import SEAL_BYTES, SealingKey
from ntkfl.privacy.shuffling import Shuffler
from ntkfl.wire import Message
from ntkfl.wire.message import describes


@dataclass(frozen=True)
class Received:
    """What an exchange gave: replies the method's round can use, how many rows they are, and rows dropped, by why."""

    replies: list[Message]
    rows: int
    rejected: Counter[str]

    @property
    def dropped(self) -> int:
        return self.rejected.total()


def send(method: Method, reply: Message, aggregator: bytes, federation: str, run: str, key: BatchKey) -> bytes:
    """A client's submission to the shuffler: its rows, each sealed to the aggregator."""
    rows = [row.encode() for row in method.split(reply)]
    return pack_rows(key, seal_rows(rows, aggregator, federation, run, key))


@dataclass(frozen=True)
class Template:
    """What every row of an exchange looks like: its arrays' names, types and shapes, and what describes the network."""

    form: Hashable
    sealed_bytes: int

    @staticmethod
    def of(method: Method, reply: Message) -> Template:
        """From any honest reply, such as one to made-up data."""
        row = method.split(reply)[0]
        return Template(_form(row), len(row.encode()) + SEAL_BYTES)


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
    The others are counted and dropped. What is left is put in the order of its bytes, so that the result does not
    depend on the shuffler's.
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
    for plain in sorted(opened):
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
    """The shuffled exchanges of a simulated round."""

    def __init__(self, round: int, clients: Sequence[int]) -> None:
        if len(clients) < 2:
            raise ConfigError("a shuffler needs a crowd: at least 2 clients a round")
        self.names = tuple(f"client-{i}" for i in clients)
        self.round, self.exchanges = round, 0
        self.federation, self.run = "simulation", "simulation"
        self.opener = SealingKey.generate()
        self.shuffler = Shuffler()

    def exchange(self, method: Method, task: Task, answers: Sequence[Message]) -> tuple[Received, int]:
        """(what the aggregator receives, the bytes clients sent)."""
        key = BatchKey(self.round, 0, self.exchanges)
        self.exchanges += 1
        template = Template.of(method, answers[0])
        bodies = [send(method, answer, self.opener.public, self.federation, self.run, key) for answer in answers]
        rows = [unpack_rows(body)[1] for body in bodies]
        self.shuffler.open(Batch(key, self.names, max(map(len, rows)), template.sealed_bytes, len(self.names), None))
        for name, own in zip(self.names, rows, strict=True):
            self.shuffler.submit(name, key, own)
        sealed = self.shuffler.release(key)
        self.shuffler.forget(key)
        received = receive(method, task, sealed, template, self.opener, self.federation, self.run, key)
        return received, sum(map(len, bodies))
