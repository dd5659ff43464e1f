"""The aggregator: the server's side of a method, with the shuffler between it and the clients.

It never holds ρ, never talks to a client, and sees rows without senders. Rounds are kept in a run folder like a
simulation's, and a run that was stopped goes on from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from ntkfl.engine.conversation import Traffic
from ntkfl.engine.crowd import Received, Template, is_padding, receive
from ntkfl.engine.folder import Record, RunFolder
from ntkfl.engine.learner import Learner, attempt_labels, draw_cohort
from ntkfl.engine.reading import read_toml
from ntkfl.engine.rounds import OnRound, play_rounds, record_of, remarks
from ntkfl.engine.services.announcement import EVALUATION, MOST_ATTEMPTS, Announcement
from ntkfl.engine.services.evaluation import MOST_SAMPLES, Score, add_up, question, score_rows
from ntkfl.engine.services.shuffler_peer import ShufflerPeer
from ntkfl.engine.services.terms import Federation, Terms
from ntkfl.errors import ConfigError, MessageError, NumericalError, RunFolderError, TooFew, TrustError
from ntkfl.methods import Client, Outcome, State, Task
from ntkfl.methods.statistics import statistics
from ntkfl.privacy.batches import Batch
from ntkfl.privacy.rows import FRAME_BYTES, BatchKey, open_row
from ntkfl.privacy.sealing import SEAL_BYTES, SealingKey, SigningKey
from ntkfl.version import __version__
from ntkfl.wire import Message


class Deployment(Terms):
    """run.toml: the terms, and what only the aggregator decides."""

    rounds: int = Field(10, ge=1)
    clients: int = Field(ge=2, description="clients to wait for before the first round")
    clients_per_round: int = Field(ge=2)
    evaluators: int = Field(0, ge=0, description="evaluators to wait for; without any, each round's clients count")
    seed: int = Field(0, ge=0, description="of the first weights and the choice of clients")
    max_rows: int = Field(200, ge=1, description="rows of samples that every client sends, padding among them")
    quorum: int = Field(1, ge=1, description="good rows below which a round is not built")
    round_seconds: float = Field(120, ge=1, description="until an exchange goes on without those who have not answered")
    patience: float = Field(600, gt=0, description="seconds to wait for enough clients before a round is begun anew")
    attempts: int = Field(3, ge=1, le=MOST_ATTEMPTS, description="beginnings of a round before the run stops")

    @staticmethod
    def read(path: Path) -> Deployment:
        return Deployment(**read_toml(path))


class Aggregator:
    """The aggregator of the federation whose folder this is; the run's folder is `out`."""

    def __init__(self, folder: Path, out: Path, say: Callable[[str], None] = print) -> None:
        self.pins, self.deployment = Federation.read(folder), Deployment.read(folder / "run.toml")
        terms, settings = self.pins.terms, self.deployment
        if settings.model_dump(include=set(Terms.model_fields)) != terms.model_dump():
            raise ConfigError("run.toml and federation.toml disagree about the terms that clients have pinned")
        if not self.pins.shuffler.min_clients <= settings.clients_per_round <= settings.clients:
            raise ConfigError(
                f"clients_per_round must be from {self.pins.shuffler.min_clients} (the shuffler's least crowd) to the "
                f"{settings.clients} clients, got {settings.clients_per_round}"
            )
        self.opener = SealingKey.load(folder / "sealing-key.pem")
        self.signer = SigningKey.load(folder / "signing-key.pem")
        if (self.opener.public.hex(), self.signer.public.hex()) != tuple(self.pins.aggregator.model_dump().values()):
            raise TrustError(f"the keys in {folder} are not those that clients have pinned")
        self.shuffler = ShufflerPeer(self.pins, folder)
        self.out, self.say = RunFolder(out), say
        out.mkdir(mode=0o700, parents=True, exist_ok=True)  # what it will hold is for its owner
        self.method = terms.build_method()
        if not self.method.shuffle:
            raise ConfigError("clients send through the shuffler here: the terms need shuffle = true")
        self._inputs = self.method.model_input_shape(terms.inputs)
        self.model = terms.build_model(settings.seed)
        smoothing = self.method.label_smoothing
        self.task = Task(
            self.model, terms.outputs, self.method.loss, total_clients=settings.clients, label_smoothing=smoothing
        )
        if self.method.trains_locally and statistics(self.model):
            raise ConfigError("batch normalisation is not averaged behind a shuffler: use group normalisation")
        self.learner, self._gathered = Learner(self.task, self.method), False

    def run(self, on_round: OnRound | None = None) -> list[Record]:
        """Train until the rounds are done; the history."""
        with self.out.locked():
            if (self.out.path / "model.safetensors").exists():
                raise RunFolderError(f"{self.out.path} holds a run that has ended: a new one needs a new ρ, a new run")
            history, _ = play_rounds(self, self.out, self._settings(), resume=True, on_round=on_round)
            self.out.save_model(self.learner.trained(self.model).state_dict())
            self._announce(Announcement("end", BatchKey(self.deployment.rounds + 1, 0, 0)))
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
        """Wait until those expected are there."""
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
        newest = self.shuffler.newest()
        first = newest.attempt + 1 if newest is not None and newest.round == number else 0
        for attempt in range(first, first + self.deployment.attempts):
            cohort = self._cohort(number, attempt)
            traffic = Traffic()
            try:
                outcome = self._converse(number, attempt, cohort, traffic)
                break
            except TooFew as error:
                self.say(f"round {number}, attempt {attempt}: {error}")
        else:
            raise TooFew(f"round {number} failed {self.deployment.attempts} times; start again to go on from the last")
        self.learner.advance(outcome)
        try:
            score = self._evaluate(number, attempt, cohort)
        except TooFew as error:  # a round that nobody measures is still a round
            self.say(f"round {number} was not evaluated: {error}")
            score = Score(None, None, 0)
        own = {"dropped_rows": traffic.dropped, "attempt": attempt, "evaluated_samples": score.samples}
        record = record_of(number, score.accuracy, score.loss, outcome, traffic, cohort) | own | outcome.diagnostics
        for line in remarks(record):
            self.say(f"round {number}: {line}")
        return record

    def _there(self, role: str) -> list[str]:
        """Names of those that can be asked, sorted."""
        return self.shuffler.clients(role)

    def _cohort(self, number: int, attempt: int) -> tuple[str, ...]:
        """As a simulation draws it, from those present by name; a repeated round asks others."""
        there = self._there("client")
        size = self.deployment.clients_per_round
        if len(there) < size:
            raise TooFew(f"{len(there)} clients are there, fewer than the {size} of a round")
        drawn = draw_cohort(self.deployment.seed, len(there), size, *attempt_labels(number, attempt))
        return tuple(there[i] for i in drawn)

    def _converse(self, number: int, attempt: int, cohort: tuple[str, ...], traffic: Traffic) -> Outcome:
        conversation = self.method.round(self.task, self.learner.state, number, range(len(cohort)))
        outgoing = next(conversation)
        nobody = Client(0, *self._made_up_sample(), seed=0)  # shows what replies look like
        for exchange in range(EVALUATION):
            if not isinstance(outgoing, Message):
                raise ConfigError(f"{self.method.name} tells clients apart, which the shuffler is there to prevent")
            template = Template.of(self.method, self.method.answer(self.task, outgoing, [nobody])[0])
            key = BatchKey(number, attempt, exchange)
            asked = Announcement("exchange", key, self._batch(key, cohort, template), outgoing)
            sent = self._announce(asked)
            traffic.downlink[outgoing.kind] += sent * len(cohort)
            rows, clients = self._collect(key)
            pins = self.pins
            received = receive(self.method, self.task, rows, template, self.opener, pins.federation, pins.run, key)
            traffic.uplink[_reply_kind(received, outgoing)] += sum(map(len, rows)) + FRAME_BYTES * clients
            traffic.rejected += received.rejected
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

    def _batch(self, key: BatchKey, cohort: tuple[str, ...], template: Template) -> Batch:
        rows = template.rows(self.deployment.max_rows)
        least, seconds = self.pins.shuffler.min_clients, self.deployment.round_seconds
        return Batch(key, cohort, rows, template.sealed_bytes, least, seconds)

    def _collect(self, key: BatchKey) -> tuple[list[bytes], int]:
        """The released rows of a batch and the number of clients they are from, as soon as the shuffler gives them."""
        until = time.monotonic() + self.deployment.round_seconds + self.deployment.patience
        while True:
            status = self.shuffler.status(key)
            if status.state in ("ready", "released"):
                rows = self.shuffler.release(key)
                self.shuffler.forget(key)
                return rows, status.clients
            if status.state == "cancelled" or time.monotonic() > until:
                self.shuffler.cancel(key)
                raise TooFew(f"{status.clients} clients answered, too few for the shuffler to release their rows")
            time.sleep(0.05)

    def _evaluate(self, number: int, attempt: int, cohort: tuple[str, ...]) -> Score:
        """The averaged model's score, as evaluators or else the round's clients count it."""
        key = BatchKey(number, attempt, EVALUATION)
        asked = question(number, self.learner.average.value)
        if self.deployment.evaluators:
            self._announce(Announcement("evaluate", key, None, asked))
            sealed = self._await_reports(key)
        else:
            (row,) = score_rows(self.task, asked, *self._made_up_sample())
            template = Template(None, len(row.encode()) + SEAL_BYTES, sampled=True)
            self._announce(Announcement("evaluate", key, self._batch(key, cohort, template), asked))
            sealed, _ = self._collect(key)
        real, most = self.pins.terms.real_targets, MOST_SAMPLES if self.deployment.evaluators else 1
        answers = []
        for sealed_row in set(sealed):
            try:
                plain = open_row(self.opener, sealed_row, self.pins.federation, self.pins.run, key)
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

    def _announce(self, said: Announcement) -> int:
        """Publish; the bytes every client gets."""
        signed = said.sign(self.signer, self.pins.federation, self.pins.run)
        self.shuffler.publish(signed)
        return len(signed)

    def _made_up_sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.zeros(1, *self._inputs, dtype=self.task.like.dtype)
        real = self.pins.terms.real_targets
        return x, torch.zeros(1, self.task.outputs, dtype=x.dtype) if real else torch.zeros(1, dtype=torch.int64)


def _reply_kind(received: Received, outgoing: Message) -> str:
    return received.replies[0].kind if received.replies else f"reply to {outgoing.kind}"
