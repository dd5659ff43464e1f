"""The aggregator: the server's side of a method, with the shuffler between it and the clients.

It never holds ρ, never talks to a client, and sees rows without senders. Rounds are kept in a run folder like a
simulation's, and a run that was stopped goes on from it.

A round of training that fails is tried again under the next round number of the protocol: clients draw fresh samples,
and nothing is asked twice. Rows are sealed to a key that is made for one such round, held in memory, and dropped with
it: a round that a restart interrupts has failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from ntkfl.crypto.hpke import SEAL_BYTES, SealingKey, SigningKey
from ntkfl.crypto.row_frames import FRAME_BYTES, VERSION, Announced, BatchKey, open_row
from ntkfl.deployment.contract import Contract, Federation
from ntkfl.errors import ConfigError, MessageError, NumericalError, Refused, RunFolderError, TooFew, TrustError
from ntkfl.federation.evaluation import MOST_SAMPLES, Score, add_up, question, score_rows
from ntkfl.federation.run_folder import Record, RunFolder
from ntkfl.federation.server import OnRound, play_rounds, record_of, remarks
from ntkfl.federation.server_state import ServerState, attempt_labels, draw_cohort
from ntkfl.federation.shuffled import Received, RowSchema, is_padding, open_rows
from ntkfl.federation.transport import Traffic
from ntkfl.methods import ClientRound, Outcome, State, Task
from ntkfl.methods.batchnorm import statistics
from ntkfl.privacy.randomness import Randomness
from ntkfl.safe_parse import read_toml
from ntkfl.services.announcement import EVALUATION, Announcement
from ntkfl.services.shuffler.batch import Batch
from ntkfl.services.shuffler.client import ShufflerClient
from ntkfl.version import __version__
from ntkfl.wire import Message


class Deployment(Contract):
    """run.toml: the contract, and what only the aggregator decides."""

    clients: int = Field(ge=2, description="clients to wait for before the first round")
    evaluators: int = Field(0, ge=0, description="evaluators to wait for; without any, each round's clients count")
    seed: int = Field(0, ge=0, description="of the first weights and the choice of clients")
    quorum: int = Field(1, ge=1, description="good rows below which a round is not built")
    round_seconds: float = Field(120, ge=1, description="until an exchange goes on without those who have not answered")
    patience: float = Field(600, gt=0, description="seconds to wait for enough clients before a round has failed")
    attempts: int = Field(3, ge=1, description="times in a row that a round may fail before the run stops")

    @staticmethod
    def read(path: Path) -> Deployment:
        return Deployment(**read_toml(path))


class Aggregator:
    """The aggregator of the federation whose folder this is; the run's folder is `out`."""

    def __init__(
        self, folder: Path, out: Path, say: Callable[[str], None] = print, *, allow_code: bool = False
    ) -> None:
        self.pins = Federation.read(folder)
        self.deployment = Deployment.read(folder / "run.toml").spelled_out(allow_code=allow_code)
        terms, settings = self.pins.terms, self.deployment
        if settings.model_dump(include=set(Contract.model_fields)) != terms.model_dump():
            raise ConfigError("run.toml and federation.toml disagree about the terms that clients have pinned")
        if not self.pins.shuffler.min_clients <= settings.clients_per_round <= settings.clients:
            raise ConfigError(
                f"clients_per_round must be from {self.pins.shuffler.min_clients} (the shuffler's least crowd) to the "
                f"{settings.clients} clients, got {settings.clients_per_round}"
            )
        self.opener = SealingKey.generate()  # of the round, which makes its own
        self.signer = SigningKey.load(folder / "signing-key.pem")
        if self.signer.public.hex() != self.pins.aggregator.signing_key:
            raise TrustError(f"the key in {folder} is not the one that clients have pinned")
        self.shuffler = ShufflerClient(self.pins, folder)
        self.out, self.say = RunFolder(out), say
        out.mkdir(mode=0o700, parents=True, exist_ok=True)  # what it will hold is for its owner
        self.method = terms.build_method(allow_code=allow_code)
        if not self.method.shuffle:
            raise ConfigError("clients send through the shuffler here: the terms need shuffle = true")
        self._inputs = self.method.model_input_shape(terms.inputs)
        self.model = terms.build_model(settings.seed, allow_code=allow_code)
        smoothing = self.method.label_smoothing
        self.task = Task(
            self.model, terms.outputs, self.method.loss, total_clients=settings.clients, label_smoothing=smoothing
        )
        if self.method.trains_locally and statistics(self.model):
            raise ConfigError("batch normalisation is not averaged behind a shuffler: use group normalisation")
        self.learner, self._gathered = ServerState(self.task, self.method), False
        self._answered = 0  # clients whose rows the round's first exchange released: later ones need exactly them
        self._dropped: set[str] = set()  # clients that answered a round's first exchange and not its next

    def run(self, on_round: OnRound | None = None) -> list[Record]:
        """Train until the rounds are done; the history."""
        with self.out.locked():
            if (self.out.path / "model.safetensors").exists():
                raise RunFolderError(f"{self.out.path} holds a run that has ended: a new one needs a new ρ, a new run")
            written = self.out.config().get("protocol", 1) if self.out.holds_run else VERSION
            if written != VERSION:
                raise RunFolderError(
                    f"{self.out.path} was written by protocol version {written}, this is {VERSION}: begin a new run"
                )
            history, _ = play_rounds(self, self.out, self._settings(), resume=True, on_round=on_round)
            self.out.save_model(self.learner.trained(self.model).state_dict())
            self._announce(Announcement("end", BatchKey(self._next_number(), 0)))
        return history

    def play(self, number: int) -> tuple[Record, Record]:
        """One round: (record, timing)."""
        if not self._gathered:
            self._gather()
        began = time.perf_counter()
        record = self._round(number)
        return record, {"round": number, "seconds": time.perf_counter() - began, "device": "cpu"}

    def checkpoint(self) -> State:
        return self.learner.checkpoint()

    def restore(self, tensors: State) -> None:
        self.learner.restore(tensors)
        self.say(f"goes on after round {self.out.load_checkpoint()[0]}")

    def _settings(self) -> Mapping[str, Any]:
        method = self.method.model_dump(mode="json")
        return {
            "ntkfl": __version__,
            "protocol": VERSION,
            "simulation": False,
            "federation": self.pins.federation,
            "run": self.pins.run,
            **self.deployment.model_dump(mode="json"),
            "method": {"name": self.method.name} | method,
            "shape": {
                "inputs": list(self.pins.terms.inputs),
                "outputs": self.pins.terms.outputs,
                "precision": self.pins.terms.precision,
            },
        }

    def _gather(self) -> None:
        """Wait until those expected are there. Rows of a round that a restart interrupted are deleted, as no key opens
        them any more.
        """
        if (newest := self.shuffler.newest()) is not None:
            with suppress(Refused):  # of an evaluation by evaluators there is no batch
                self.shuffler.cancel(newest)
        for role, wanted in (("client", self.deployment.clients), ("evaluator", self.deployment.evaluators)):
            until, told = time.monotonic() + self.deployment.patience, -1
            while len(there := self._there(role)) < wanted:
                if len(there) != told:
                    told = len(there)
                    left = max(0.0, until - time.monotonic())
                    self.say(f"{told} of {wanted} {role}s are there; waits {left:.0f} seconds more at most")
                if time.monotonic() > until:
                    raise TooFew(f"{len(there)} of {wanted} {role}s came within {self.deployment.patience:g} seconds")
                time.sleep(0.2)
        self._gathered = True

    def _round(self, number: int) -> Record:
        """Round `number` of training, under the next round number of the protocol; where that fails, the next again."""
        for attempt in range(self.deployment.attempts):
            turn = self._next_number()
            if turn > self.deployment.most_rounds:
                most = self.deployment.most_rounds
                raise TooFew(f"all {most} rounds that the contract allows are used up, failed ones included")
            cohort = self._cohort(number, attempt)
            self.opener = SealingKey.generate()
            try:
                return self._try(number, turn, cohort)
            except TooFew as error:
                self.say(f"round {number}, attempt {attempt}: {error}")
            finally:
                self.opener = SealingKey.generate()  # nothing opens the round's rows any more
        raise TooFew(f"round {number} failed {self.deployment.attempts} times; start again to go on from the last")

    def _try(self, number: int, turn: int, cohort: tuple[str, ...]) -> Record:
        traffic = Traffic()
        outcome = self._converse(number, turn, cohort, traffic)
        self.learner.advance(outcome)
        try:
            score = self._evaluate(number, turn, cohort)
        except TooFew as error:  # a round that nobody measures is still a round
            self.say(f"round {number} was not evaluated: {error}")
            score = Score(None, None, 0)
        own = {"dropped_rows": traffic.dropped, "protocol_round": turn, "evaluated_samples": score.samples}
        record = record_of(number, score.accuracy, score.loss, outcome, traffic, cohort) | own | outcome.diagnostics
        for line in remarks(record):
            self.say(f"round {number}: {line}")
        return record

    def _next_number(self) -> int:
        """The first round number of the protocol under which nothing was ever announced, before a restart too."""
        newest = self.shuffler.newest()
        return 1 if newest is None else newest.round + 1

    def _there(self, role: str) -> list[str]:
        """Names of those that can be asked, sorted."""
        return self.shuffler.clients(role)

    def _cohort(self, number: int, attempt: int) -> tuple[str, ...]:
        """As a simulation draws it, from those present by name; a repeated round asks others, and first of all others
        than those that made a round fail.
        """
        present, size = self._there("client"), self.deployment.clients_per_round
        there = [name for name in present if name not in self._dropped]
        if len(there) < size:
            there, self._dropped = present, set()
        if len(there) < size:
            raise TooFew(f"{len(there)} clients are there, fewer than the {size} of a round")
        drawn = draw_cohort(self.deployment.seed, len(there), size, *attempt_labels(number, attempt))
        return tuple(there[i] for i in drawn)

    def _converse(self, number: int, turn: int, cohort: tuple[str, ...], traffic: Traffic) -> Outcome:
        conversation = self.method.round(self.task, self.learner.state, number, range(len(cohort)))
        outgoing = next(conversation)
        nobody = ClientRound(0, *self._made_up_sample(), Randomness.simulated(0))  # shows what replies look like
        for exchange in range(EVALUATION):
            if not isinstance(outgoing, Message):
                raise ConfigError(f"{self.method.name} tells clients apart, which the shuffler is there to prevent")
            template = RowSchema.of(self.method, self.method.answer(self.task, outgoing, [nobody])[0])
            key = BatchKey(turn, exchange)
            batch = self._batch(key, cohort, template)
            signed = self._announce(Announcement("exchange", key, batch, outgoing, self.opener.public))
            traffic.downlink[outgoing.kind] += len(signed) * len(cohort)
            announced, pins = Announced.of(key, signed), self.pins
            rows, clients = self._collect(announced)
            received = open_rows(
                self.method, self.task, rows, template, self.opener, pins.federation, pins.run, announced
            )
            traffic.uplink[_reply_kind(received, outgoing)] += sum(map(len, rows)) + FRAME_BYTES * clients
            traffic.rejected += received.rejected
            traffic.repeated += received.repeated
            if received.rows < self.deployment.quorum:
                raise TooFew(f"{received.rows} good rows of {len(rows)}, below the quorum of {self.deployment.quorum}")
            try:
                outgoing = conversation.send(received.replies)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome
            except (MessageError, NumericalError) as error:  # rows that pass for good and are not: ask others
                raise TooFew(f"the round cannot be built from its {received.rows} rows: {error}") from None
        raise ConfigError(f"a round of {self.method.name} has more exchanges than an announcement can number")

    def _batch(self, key: BatchKey, cohort: tuple[str, ...], template: RowSchema) -> Batch:
        rows = template.rows(self.deployment.max_rows)
        least, seconds = self.pins.shuffler.min_clients, self.deployment.round_seconds
        return Batch(key, cohort, rows, template.sealed_bytes, least, seconds)

    def _collect(self, announced: Announced) -> tuple[list[bytes], int]:
        """The released rows of a batch and the number of clients they are from, as soon as the shuffler gives them.

        Past its deadline, a round's first exchange goes on without those that have not answered, and waits for a crowd
        as long as `patience` says; a later one can only be released whole, so the round has failed.
        """
        key, until = announced.key, time.monotonic() + self.deployment.round_seconds + self.deployment.patience
        while True:
            status = self.shuffler.status(key)
            if status.state in ("ready", "released"):
                rows = self.shuffler.release(announced)
                self.shuffler.forget(key)
                self._answered = status.clients if key.exchange == 0 else self._answered
                return rows, status.clients
            late = time.monotonic() > until or (key.exchange > 0 and status.seconds == 0)
            if status.state == "cancelled" or late:
                self.shuffler.cancel(key)
                self._dropped |= set(status.missing)
                whom = f" of the {self._answered} that began the round" if key.exchange else ""
                raise TooFew(f"{status.clients} clients{whom} answered, too few for the shuffler to release their rows")
            time.sleep(0.05)

    def _evaluate(self, number: int, turn: int, cohort: tuple[str, ...]) -> Score:
        """The averaged model's score, as evaluators or else the round's clients count it."""
        key = BatchKey(turn, EVALUATION)
        asked = question(number, self.learner.average.value)
        (row,) = score_rows(self.task, asked, *self._made_up_sample())
        template = RowSchema(row.kind, row.header(), b"", len(row.encode()) + SEAL_BYTES, sampled=True)
        batch = None if self.deployment.evaluators else self._batch(key, cohort, template)
        signed = self._announce(Announcement("evaluate", key, batch, asked, self.opener.public))
        announced = Announced.of(key, signed)
        sealed = self._collect(announced)[0] if batch is not None else self._await_reports(key)
        real, most = self.pins.terms.real_targets, MOST_SAMPLES if self.deployment.evaluators else 1
        answers = []
        for sealed_row in set(sealed):
            try:
                plain = open_row(self.opener, sealed_row, self.pins.federation, self.pins.run, announced)
                if is_padding(plain):
                    continue
                answer = Message.decode(plain)
                add_up([answer], real, most)
                answers.append(answer)
            except (MessageError, TrustError) as error:
                self.say(f"round {number}: counts were dropped: {error}")
        return add_up(answers, real, most)

    def _await_reports(self, key: BatchKey) -> list[bytes]:
        until = time.monotonic() + self.deployment.round_seconds
        while True:
            reports = self.shuffler.reports(key)
            if len(reports) >= self.deployment.evaluators or (reports and time.monotonic() > until):
                self.shuffler.forget(key)
                return reports
            if time.monotonic() > until + self.deployment.patience:
                raise TooFew(f"no evaluator answered in round {key.round}")
            time.sleep(0.05)

    def _announce(self, said: Announcement) -> bytes:
        """Publish; the bytes every client gets."""
        signed = said.sign(self.signer, self.pins.federation, self.pins.run)
        self.shuffler.publish(signed)
        return signed

    def _made_up_sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.zeros(1, *self._inputs, dtype=self.task.like.dtype)
        real = self.pins.terms.real_targets
        return x, torch.zeros(1, self.task.outputs, dtype=x.dtype) if real else torch.zeros(1, dtype=torch.int64)


def _reply_kind(received: Received, outgoing: Message) -> str:
    return received.replies[0].kind if received.replies else f"reply to {outgoing.kind}"
