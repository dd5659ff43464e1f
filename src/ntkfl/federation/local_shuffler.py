"""A shuffler in this process, with the shuffler's own code: simulated bytes are real bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ntkfl.crypto.context import bind
from ntkfl.crypto.mask_format import SEED_BYTES
from ntkfl.crypto.row_frames import Announced, BatchKey, unpack_rows
from ntkfl.errors import ConfigError, NTKFLError, Refused, TooFew
from ntkfl.federation.client import SeededRandomness
from ntkfl.federation.secure_sum import SumSchema, mask_reply
from ntkfl.federation.shuffled import Mixed, RowSchema, ShuffledTransport, seal_reply
from ntkfl.federation.transport import Traffic, Transport
from ntkfl.federation.validation import MALFORMED
from ntkfl.methods import Method, State, Task
from ntkfl.services.shuffler.batch import Batch
from ntkfl.services.shuffler.store import BatchStore
from ntkfl.wire import Message

LEAST_CLIENTS = 2  # without whose rows a simulated batch is not released: a deployed shuffler's least


class LocalShuffler(ShuffledTransport):
    """Between the server and the clients that `inner` reaches, each of which sends `rows` rows of samples. It plays the
    clients' sealing, the shuffler and the aggregator.
    """

    floor = LEAST_CLIENTS

    def __init__(self, inner: Transport, task: Task, method: Method, rows: int, seed: int = 0) -> None:
        super().__init__(task, method, "simulation", "simulation")
        self.inner, self.rows, self.seed = inner, rows, seed
        self._key, self._present = BatchKey(0, 0), frozenset[int]()
        self._shuffler = self._make()

    def _make(self) -> BatchStore:
        return BatchStore(floor=LEAST_CLIENTS)

    def available(self, wanted: int) -> Sequence[int]:
        return self.inner.available(wanted)

    def name(self, client: int) -> int | str:
        return self.inner.name(client)

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        if len(cohort) < LEAST_CLIENTS:
            raise ConfigError(f"a shuffler hides nobody among fewer: at least {LEAST_CLIENTS} clients per round")
        super().begin(round, cohort)
        self.inner.begin(round, cohort)
        self._key, self._present = BatchKey(round, 0), frozenset(cohort)
        self._shuffler = self._make()

    def mix(self, message: Message, cohort: Sequence[int], traffic: Traffic) -> Mixed:
        """A client whose rows the shuffler refuses in the first exchange loses them, and is as if absent; in a later
        one the round fails, as a shuffler then releases nothing.
        """
        answers = dict(zip(cohort, self._answers(message, cohort, traffic), strict=True))
        own = {number: answer for number, answer in answers.items() if number in self._present}
        key, self._key = self._key, BatchKey(self._key.round, self._key.exchange + 1)
        announced = Announced.of(key, bind("simulation", *key))  # in the place of an announcement's digest
        where = (self.opener.public, self.federation, self.run, announced)
        schema: RowSchema | SumSchema
        if self.method.secure_sum:
            schema, bodies = self._masked(message, own, len(cohort), where)
        else:
            schema = _schema(self.method, self.task, list(own.values()))
            count = schema.rows(self.rows)
            bodies = {number: seal_reply(self.method, answer, count, *where) for number, answer in own.items()}
        names = {number: f"client-{number}" for number in cohort}
        sizes = schema.rows(self.rows), schema.sealed_bytes
        numbers = schema.numbers if isinstance(schema, SumSchema) else 0
        batch = Batch(key, tuple(names.values()), *sizes, LEAST_CLIENTS, numbers)
        self._shuffler.open(batch, announced.digest)
        taken = set()
        for number, body in bodies.items():
            with suppress(Refused):
                self._submit(names[number], announced, body, batch)
                taken.add(number)
        for number in own.keys() - taken:
            traffic.rejected[MALFORMED] += len(self.method.split(own[number]))
        self._present = frozenset(taken) if key.exchange == 0 else self._present
        if len(taken) < LEAST_CLIENTS or taken != self._present:
            self._shuffler.cancel(key)
            why = f"{traffic.rejected[MALFORMED]} rows were {MALFORMED}"
            raise TooFew(f"{len(taken)} clients' rows were taken, too few for the shuffler to release them: {why}")
        sealed = self._shuffler.release(key)
        masks = self._shuffler.masks(key) if numbers else b""
        self._shuffler.forget(key)
        return Mixed(sealed, schema, announced, sum(map(len, bodies.values())), masks)

    def _masked(
        self, message: Message, own: Mapping[int, Message], clients: int, where: tuple[bytes, str, str, Announced]
    ) -> tuple[SumSchema, dict[int, bytes]]:
        """What every client's vector looks like, and the submissions of those that have one like it."""
        schemas, words = {}, {}
        for number, answer in own.items():
            with suppress(NTKFLError):  # a client that cannot comply leaves the round
                summand = self.method.summand(self.task, message, answer)
                schemas[number] = SumSchema.of(answer.kind, summand, clients)
                draws = SeededRandomness(self.seed, number).of_round(message.round)
                words[number] = schemas[number].encode(summand, draws)
        if not words:
            raise TooFew("no client's reply could be summed")
        schema = Counter(schemas[number] for number in words).most_common(1)[0][0]
        return schema, {n: mask_reply(some, *where) for n, some in words.items() if schemas[n] == schema}

    def _submit(self, client: str, announced: Announced, body: bytes, batch: Batch) -> None:
        if batch.numbers:
            self._shuffler.submit(client, announced, unpack_rows(body[SEED_BYTES:])[1], body[:SEED_BYTES])
        else:
            self._shuffler.submit(client, announced, unpack_rows(body)[1])

    def _answers(self, message: Message, cohort: Sequence[int], traffic: Traffic) -> list[Message]:
        """What clients would seal. Bytes up are counted once they are sealed."""
        inner = Traffic()
        answers = self.inner.exchange(message, cohort, inner)
        traffic.downlink += inner.downlink
        traffic.client_seconds += inner.client_seconds
        traffic.failed |= inner.failed
        if len(answers) < len(cohort):
            raise TooFew(f"a simulated shuffler waits for its whole cohort; failed: {inner.failed}")
        return answers

    def accepted(self, replies: Sequence[Message]) -> None:
        self.inner.accepted(replies)

    def end(self, completed: bool) -> None:
        super().end(completed)
        self.inner.end(completed)

    def notes(self, cohort: Sequence[int]) -> dict[str, Any]:
        return super().notes(cohort) | self.inner.notes(cohort)

    def checkpoint(self) -> State:
        return self.inner.checkpoint()

    def restore(self, tensors: State) -> None:
        self.inner.restore(tensors)


def _schema(method: Method, task: Task, answers: Sequence[Message]) -> RowSchema:
    """The honest one, without the samples an aggregator makes up for it: the commonest that the method can read."""
    seen = [(RowSchema.of(method, answer), answer) for answer in answers]
    schemas = [schema for schema, _ in Counter(schema for schema, _ in seen).most_common()]
    for schema in schemas if len(schemas) > 1 else ():
        if any(_readable(method, task, answer) for own, answer in seen if own == schema):
            return schema
    return schemas[0]


def _readable(method: Method, task: Task, answer: Message) -> bool:
    try:
        method.check(task, answer)
    except NTKFLError:
        return False
    return True
