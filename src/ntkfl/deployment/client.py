"""A client of a federation: enrols, and answers what the aggregator announces, with data that stay here.

It talks to the key server (once) and to the shuffler. What it gives away, in how many rounds and among how many other
clients, is fixed by the contract it pins; an announcement that asks for anything else, comes twice, or changes a
round's cohort is not answered. What was answered is counted on the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from ntkfl.crypto.receipt import check_receipt
from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.deployment.announcement_check import check_contract, check_rows, summed
from ntkfl.deployment.contract import Federation
from ntkfl.deployment.ledger import Ledger, mark_ended
from ntkfl.errors import ConfigError, MessageError, NTKFLError, Refused, TrustError
from ntkfl.federation.client import Client, ClientRandomness, SystemRandomness, check_data
from ntkfl.federation.evaluation import SUMMED_SAMPLES, counts, counts_summand, rounded, score_rows
from ntkfl.federation.feature_cache import split_frozen
from ntkfl.federation.secure_sum import SumSchema, mask_reply
from ntkfl.federation.shuffled import seal_messages
from ntkfl.methods import ClientRound, Task
from ntkfl.privacy.randomness import Randomness
from ntkfl.progress import plural, span
from ntkfl.services.announcement import Announcement
from ntkfl.services.http.client import ANNOUNCED, HttpClient
from ntkfl.services.key_server.client import Identity
from ntkfl.services.shuffler.batch import EVALUATORS
from ntkfl.wire import Message

_USUAL_INPUT = 50.0  # of standardised data: beyond it lie other units, or raw bytes


class ShuffledClient:
    """One client or evaluator, its folder and its data: x [n, *inputs], y classes [n] or real [n, outputs]."""

    def __init__(
        self,
        folder: Path,
        x: Tensor,
        y: Tensor,
        *,
        randomness: ClientRandomness | None = None,
        patience: float = 60,
        say: Callable[[str], None] = print,
        allow_code: bool = False,
    ) -> None:
        self.federation, self.folder, self.say = Federation.read(folder), folder, say
        terms = self.federation.terms
        check_data(x, y, terms.inputs, terms.outputs)
        if (largest := float(x.abs().max())) > _USUAL_INPUT:
            say(
                f"warning: inputs are as large as {largest:.3g}, and scaled ones seldom exceed {_USUAL_INPUT:g}: give "
                "them in the units, and scaled, as all clients have agreed, or the aggregator may reject their rows"
            )
        model = terms.build_model(seed=0, allow_code=allow_code)  # before anybody hears of this client
        self.identity = Identity(folder, self.federation, patience)
        self.shuffler = HttpClient(self.federation.shuffler.url, folder / "ca.pem", patience=patience)
        self.shuffler.identify(self.identity.current, self.identity.signing)
        self.name, self.role = self.identity.known.client, self.identity.known.role
        self.method = terms.build_method(allow_code=allow_code)
        trained, self.features = split_frozen(model, self.method, folder / "features")
        task = Task(trained, terms.outputs, self.method.loss, label_smoothing=self.method.label_smoothing)
        self.x, self.y = self._placed(x, y, task)
        rows = terms.max_rows if self.method.sampled else None
        own = randomness or SystemRandomness()
        self.client = Client(0, task, self.method, lambda: (self.x, self.y), own, rows=rows)
        self._round: int | None = None  # of the protocol, whose first exchange was answered
        self.ledger = Ledger(folder, self.federation.run)
        self._path = f"/v1/runs/{self.federation.run}"

    @property
    def _run(self) -> tuple[str, str]:
        """Names of the federation and of the run."""
        return self.federation.federation, self.federation.run

    def _placed(self, x: Tensor, y: Tensor, task: Task) -> tuple[Tensor, Tensor]:
        """The samples as what trains gets them: projected with the key server's seed, behind a frozen backbone."""
        x, terms = x.to(task.like.dtype), self.federation.terms
        if self.method.projected_dim is not None:
            projection = self.method.make_projection(self.identity.run_secret(), terms.inputs)
            assert projection is not None
            x = projection(x)
        x = x if self.features is None else self.features(x)
        return x, y.to(task.like.dtype) if y.is_floating_point() else y.long()

    def run(self) -> int:
        """Take part until the aggregator ends the run; the number of exchanges answered."""
        self.hello()
        self.say(f"is enrolled as {self.role}; waits for {'/'.join(self._run)} at {self.shuffler.url}")
        if (newest := self.ledger.read()) is not None:
            self.say(f"is back after {span(self.ledger.age())}; heard of round {newest[0].round} last")
        sequence, answered = 0, 0
        while True:
            response = self.shuffler.ask("GET", f"{self._path}/announcement?after={sequence}", most=ANNOUNCED)
            if response.status_code == 204:
                continue
            sequence = next_sequence(response.headers.get("ntkfl-sequence", ""), sequence)
            try:
                said = self.heed(response.content)
                if said is None:
                    continue
                if said.kind == "end":
                    answers = plural(answered, "question")
                    self.say(f"the run has ended; answered {answers} since it was started, and leaves")
                    mark_ended(self.folder, self.federation.run)
                    return answered
                began, round = time.perf_counter(), said.key.round
                if self.answer(said) is None:
                    continue
                answered += 1
                if said.key.exchange == 0 or self.role == "evaluator":  # a line per round
                    self.say(f"answered round {round} in {time.perf_counter() - began:.1f} s")
            except Refused as refusal:
                if refusal.reason == "revoked":
                    raise
                self.say(f"{refusal.reason}: {refusal}")
            except NTKFLError as error:
                self.say(f"not answered: {error}")
            except Exception as error:  # whatever an announcement does to this client, the next may be sound
                self.say(f"not answered: {type(error).__name__}")

    def hello(self) -> None:
        """Tell the shuffler that this client is there."""
        self.shuffler.ask("POST", f"{self._path}/hello")

    def heed(self, signed: bytes) -> Announcement | None:
        """An announcement the aggregator signed, that is newer than the last and keeps to the contract; older ones are
        left alone. On return it is in the ledger: it is answered now or never.
        """
        said = Announcement.check(signed, bytes.fromhex(self.federation.aggregator.signing_key), *self._run)
        if said.kind != "end":
            check_contract(said, self.federation, self.method, self.role)
        apart = said.batch is None or said.key.exchange == EVALUATORS
        cohort = "" if said.batch is None or apart else said.batch.cohort_digest().hex()
        if self.ledger.take(said.key, cohort):
            return said
        newest = self.ledger.read()
        # The end is not answered, so a client that comes back after it hears it again.
        return said if said.kind == "end" and newest is not None and newest[0] == said.key else None

    def answer(self, said: Announcement) -> bytes | None:
        """Send what was asked for: the shuffler's receipt; None if this client was not asked."""
        if said.message is None or said.announced is None or said.sealing_key is None:
            return None
        asked = said.batch is not None and self.name in said.batch.cohort
        where = (said.sealing_key, *self._run, said.announced)
        if self.role == "evaluator" and said.kind == "evaluate" and self.federation.terms.sum_counts:
            return self._send("sums", said.announced, self._masked(said, where)) if asked else None
        if said.kind == "evaluate" and self.role == "evaluator":
            check_rows(said, 1)
            return self._send("reports", said.announced, seal_messages([self._counts(said.message)], 1, *where))
        if not asked or self.role != "client" or said.key.exchange == EVALUATORS:
            return None
        if summed(said, self.federation, self.method):
            return self._send("sums", said.announced, self._masked(said, where))
        if said.kind == "evaluate":
            rows, count = self._score_rows(said.key, said.message), self.federation.terms.max_rows
        else:
            self.at(said.key, said.message.round)
            reply = self.client.answer(said.message, said.key.round)
            rows = self.method.split(reply)
            count = self.federation.terms.max_rows if reply.kind in self.method.sampled else 1
        check_rows(said, count)
        return self._send("rows", said.announced, seal_messages(rows, count, *where))

    def _masked(self, said: Announcement, where: tuple[bytes, str, str, Announced]) -> bytes:
        """The seed of a mask and the masked answer, where what is asked for is what such an answer has by contract."""
        message, method, task = said.message, self.method, self.client.task
        assert message is not None
        assert said.batch is not None
        clients, randomness = self.federation.terms.clients_per_round, Randomness.fresh()  # of the rounding
        if self.role == "evaluator":
            reply, clients = self._counts(message), len(said.batch.cohort)
            summand = counts_summand(reply, SUMMED_SAMPLES)
        elif said.kind == "evaluate":
            own = self.at(said.key, message.round)
            reply = counts(task, message, own.x, own.y)
            summand = counts_summand(reply, method.sum_samples)
        else:
            randomness = self.at(said.key, message.round).randomness
            reply = self.client.answer(message, said.key.round)
            summand = method.summand(task, message, reply)
        schema = SumSchema.of(reply.kind, summand, clients)
        if (said.batch.numbers, said.batch.row_bytes) != (schema.numbers, schema.sealed_bytes):
            raise TrustError(f"round {said.key.round} asks for {said.batch.numbers} numbers, not {schema.numbers}")
        words = schema.encode(summand, randomness)
        if words[0]:
            self.say("numbers of this reply were beyond their limit and scaled down to it")
        return mask_reply(words, *where)

    def at(self, key: BatchKey, number: int) -> ClientRound:
        """This client in the round, with the samples drawn at its first exchange. A round that is tried again has
        another key, and gets other samples; `number` is that of training, which only seeded randomness looks at.
        """
        if key.exchange == 0:
            self.client.rest()
            self._round = key.round
        if self._round != key.round:
            raise ConfigError(f"round {key.round} goes on, but this client was not there at its beginning")
        return self.client.at(number, key.round)

    def _score_rows(self, key: BatchKey, message: Message) -> list[Message]:
        """Of the round's samples alone: no more of this client shows than in training."""
        client = self.at(key, message.round)
        rows, most = score_rows(self.client.task, message, client.x, client.y), self.federation.terms.max_rows
        return rows if len(rows) <= most else self.client.randomness.subsampling(message.round).sample(rows, most)

    def _counts(self, message: Message) -> Message:
        """An evaluator's answer, no more exact than the contract says."""
        terms = self.federation.terms
        answer = counts(self.client.task, message, self.x, self.y)
        return rounded(answer, terms.count_multiple) if terms.count_multiple > 1 else answer

    def _send(self, kind: str, announced: Announced, framed: bytes) -> bytes:
        """The shuffler's receipt, which says that it holds the rows for the announcement that this client heard."""
        answer = self.shuffler.ask("POST", f"{self._path}/{kind}", framed).json()
        try:
            receipt = bytes.fromhex(answer.get("receipt", ""))
        except (ValueError, TypeError, AttributeError):
            raise MessageError("the shuffler's answer holds no receipt that can be read") from None
        shuffler = bytes.fromhex(self.federation.shuffler.signing_key)
        check_receipt(receipt, shuffler, *self._run, announced)
        return receipt


def next_sequence(said: str, before: int) -> int:
    """The number of the announcement just received; the next one, if the shuffler does not say."""
    return max(before + 1, int(said)) if said.isdecimal() and len(said) < 19 else before + 1
