"""A shuffler in this process, with the shuffler's own code: simulated bytes are real bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ntkfl.crypto.context import bind
from ntkfl.crypto.row_frames import SEED_BYTES, Announced, BatchKey, unpack_rows
from ntkfl.errors import ConfigError, NTKFLError, Refused, TooFew
from ntkfl.federation.client import SeededRandomness
from ntkfl.federation.secure_sum import SumSchema, mask_reply
from ntkfl.federation.shuffled import Mixed, RowSchema, ShuffledTransport, seal_reply
from ntkfl.federation.transport import Traffic, Transport
from ntkfl.federation.validation import MALFORMED
from ntkfl.methods import Method, State, Task
from ntkfl.methods.replies import Reply
from ntkfl.services.announcement import Batch
from ntkfl.services.store import BatchStore
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
        self._shuffler = BatchStore(floor=LEAST_CLIENTS)

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
        self._shuffler = BatchStore(floor=LEAST_CLIENTS)

    def mix(self, question: Message, cohort: Sequence[int], traffic: Traffic) -> Mixed:
        """A client whose rows the shuffler refuses in the first exchange loses them, and is as if absent; in a later
        one the round fails, as a shuffler then releases nothing.
        """
        kind = self.method.replies[question.kind]
        answers = zip(cohort, self._answers(question, cohort, traffic), strict=True)
        replies = {number: kind(m.arrays, m.halves) for number, m in answers if number in self._present}
        key, self._key = self._key, BatchKey(self._key.round, self._key.exchange + 1)
        announced = Announced.of(key, bind("simulation", *key))  # in the place of an announcement's digest
        schema = self.schema(question, len(cohort))
        bodies = self._bodies(question, schema, replies, announced)
        numbers = schema.numbers if isinstance(schema, SumSchema) else 0
        sizes = schema.rows(self.rows), schema.sealed_bytes
        batch = Batch(key, len(cohort), *sizes, LEAST_CLIENTS, numbers)
        self._shuffler.open(batch, announced.digest)
        taken = set()
        for number, body in bodies.items():
            with suppress(Refused):
                self._submit(str(number), announced, body, masked=numbers > 0)
                taken.add(number)
        for number in replies.keys() - taken:
            traffic.rejected[MALFORMED] += _row_count(replies[number])
            traffic.reasons.setdefault(MALFORMED, "a submission of another form than this round's")
        self._present = frozenset(taken) if key.exchange == 0 else self._present
        if len(taken) < LEAST_CLIENTS or taken != self._present:
            self._shuffler.discard(key)
            why = f"{traffic.rejected[MALFORMED]} rows were {MALFORMED}"
            raise TooFew(f"{len(taken)} clients' rows were taken, too few for the shuffler to release them: {why}")
        _, sealed, masks = self._shuffler.release(key)
        self._shuffler.discard(key)
        return Mixed(sealed, schema, announced, sum(map(len, bodies.values())), masks)

    def _bodies(
        self, question: Message, schema: RowSchema | SumSchema, replies: Mapping[int, Reply], announced: Announced
    ) -> dict[int, bytes]:
        """What clients submit; one that cannot comply leaves the round."""
        where, bodies = (self.opener.public, self.federation, self.run, announced), {}
        for number, reply in replies.items():
            with suppress(NTKFLError):
                if isinstance(schema, RowSchema):
                    bodies[number] = seal_reply(reply, question.round, schema.rows(self.rows), *where)
                    continue
                addends = reply.addends(self.method, self.task, question)
                if SumSchema.of(reply.kind, addends, schema.clients) == schema:
                    draws = SeededRandomness(self.seed, number).of_round(question.round)
                    bodies[number] = mask_reply(schema.encode(addends, draws), *where)
        return bodies

    def _submit(self, client: str, announced: Announced, body: bytes, masked: bool) -> None:
        seed = body[:SEED_BYTES] if masked else b""
        rows = unpack_rows(body[len(seed) :])[1]
        self._shuffler.submit(client, announced, rows, *([seed] if masked else []))

    def _answers(self, question: Message, cohort: Sequence[int], traffic: Traffic) -> list[Message]:
        """What clients would seal. Bytes up are counted once they are sealed."""
        inner = Traffic()
        answers = self.inner.exchange(question, cohort, inner)
        traffic.downlink += inner.downlink
        traffic.client_seconds += inner.client_seconds
        return answers

    def accepted(self, replies: Sequence[Reply]) -> None:
        self.inner.accepted(replies)

    def end(self) -> None:
        super().end()
        self.inner.end()

    def notes(self, cohort: Sequence[int]) -> dict[str, Any]:
        return super().notes(cohort) | self.inner.notes(cohort)

    def checkpoint(self) -> State:
        return self.inner.checkpoint()

    def restore(self, tensors: State) -> None:
        self.inner.restore(tensors)


def _row_count(reply: Reply) -> int:
    try:
        return len(reply.split())
    except (NTKFLError, TypeError):  # a number where there should be rows
        return 1
