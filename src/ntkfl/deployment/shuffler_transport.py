"""The way to clients through the shuffler: questions are announced, sealed rows come back in one batch per exchange.

A round that fails is tried again under the next round number of the protocol: clients draw fresh samples, and nothing
is asked twice. A round that a restart interrupts has failed, as its key was held in memory alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ntkfl.crypto.hpke import SEAL_BYTES, SigningKey
from ntkfl.crypto.mask_format import SEED_BYTES
from ntkfl.crypto.row_frames import FRAME_BYTES, Announced, BatchKey, open_row
from ntkfl.deployment.contract import Deployment, Federation
from ntkfl.deployment.ledger import mark_ended
from ntkfl.deployment.waiting import wait_for_batch, wait_for_reports
from ntkfl.errors import ConfigError, MessageError, OutOfRounds, Refused, TooFew, TrustError
from ntkfl.federation.evaluation import SUMMED_SAMPLES, counts_summand, score_rows, total_counts
from ntkfl.federation.secure_sum import SumSchema
from ntkfl.federation.shuffled import Mixed, RowSchema, ShuffledTransport, is_padding
from ntkfl.federation.transport import Traffic
from ntkfl.methods import ClientRound, Method, Task
from ntkfl.privacy.randomness import Randomness
from ntkfl.services.announcement import EVALUATION, Announcement
from ntkfl.services.shuffler.batch import EVALUATORS, LEAST_EVALUATORS, Batch, least_of
from ntkfl.services.shuffler.client import ShufflerClient
from ntkfl.wire import Message

_GATHER_S = 0.2  # between two looks at who is there


class ShufflerTransport(ShuffledTransport):
    """Of the aggregator whose folder this is. Clients are numbered, in each round anew, in the order of their names."""

    def __init__(
        self,
        folder: Path,
        federation: Federation,
        settings: Deployment,
        task: Task,
        method: Method,
        say: Callable[[str], None],
    ) -> None:
        self.signer = SigningKey.load(folder / "signing-key.pem")
        if self.signer.public.hex() != federation.aggregator.signing_key:
            raise TrustError(f"the key in {folder} is not the one that clients have pinned")
        super().__init__(task, method, federation.federation, federation.run)
        self.settings, self.say, self.peers, self.quorum, self._folder = (
            settings,
            say,
            federation,
            settings.quorum,
            folder,
        )
        self.shuffler = ShufflerClient(federation, folder)
        self._inputs = method.model_input_shape(federation.terms.inputs)
        self._names: list[str] = []  # of the clients of this round, by number
        self._number, self._round = 0, 0  # of training, and of the protocol
        self._exchange = 0
        self.answered = 0  # clients whose rows the round's first exchange released: later ones need exactly them
        self.dropped: set[str] = set()  # clients that answered a round's first exchange and not its next

    def gather(self) -> None:
        """Wait until those expected are there. Rows of a round that a restart interrupted are deleted, as no key opens
        them any more.
        """
        if (newest := self.shuffler.newest()) is not None:
            with suppress(Refused):  # of an evaluation by evaluators there is no batch
                self.shuffler.cancel(newest)
        for role, wanted in (("client", self.settings.clients), ("evaluator", self.settings.evaluators)):
            until, told = time.monotonic() + self.settings.patience, -1
            while len(there := self.present(role)) < wanted:
                if len(there) != told:
                    told = len(there)
                    left = max(0.0, until - time.monotonic())
                    self.say(f"{role}s that are there: {told} of {wanted}; waits {left:.0f} s more at most")
                if time.monotonic() > until:
                    raise TooFew(f"{len(there)} of {wanted} {role}s came within {self.settings.patience:g} seconds")
                time.sleep(_GATHER_S)

    def present(self, role: str) -> list[str]:
        """Names of those that can be asked, sorted."""
        return self.shuffler.clients(role)

    def lapsed(self) -> list[str]:
        """Clients that do not answer and have not called since, where the shuffler tells which it does not wait for."""
        return self.shuffler.presence("client").lapsed

    def available(self, wanted: int) -> Sequence[int]:
        """Clients that are there; others than those that made a round fail, or have lapsed, as long as there are
        `wanted` others.
        """
        present = self.present("client")
        if len(present) < wanted:
            raise TooFew(f"{len(present)} clients are there, fewer than the {wanted} that a round is drawn from")
        if len(set(present) - self.dropped) < wanted:
            self.dropped = set()
        self._names = drawn_from(present, self.lapsed(), self.dropped, wanted)
        return range(len(self._names))

    def name(self, client: int) -> str:
        return self._names[client]

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        super().begin(round, cohort)
        self._number, self._round, self._exchange = round, self._next_round(), 0
        most = self.settings.most_rounds
        if self._round > most:
            raise OutOfRounds(f"all {most} rounds that the contract allows are used up, failed ones included")

    def _next_round(self) -> int:
        """The first round number of the protocol under which nothing was ever announced, before a restart too."""
        newest = self.shuffler.newest()
        return 1 if newest is None else newest.round + 1

    def mix(self, message: Message, cohort: Sequence[int], traffic: Traffic) -> Mixed:
        if self._exchange >= EVALUATION:
            raise ConfigError(f"a round of {self.method.name} has more exchanges than an announcement can number")
        began = time.perf_counter()
        key, schema = BatchKey(self._round, self._exchange), self.schema(message)
        self._exchange += 1
        asked = Announcement("exchange", key, self.batch(key, cohort, schema), message, self.opener.public)
        signed = self.announce(asked, traffic)
        traffic.downlink[message.kind] += len(signed) * len(cohort)
        announced = Announced.of(key, signed)
        released = self._collect(announced, schema, len(cohort), traffic)
        traffic.client_seconds += time.perf_counter() - began
        if self.method.secure_sum and len(released.rows) < self.settings.quorum:
            raise TooFew(f"a sum of {len(released.rows)} clients, below the quorum of {self.settings.quorum}")
        return released

    def _collect(self, announced: Announced, schema: RowSchema | SumSchema, asked: int, traffic: Traffic) -> Mixed:
        """The released rows of a batch, and of a secure sum the sum of their masks, as soon as the shuffler gives them;
        `TooFew` where it never will.
        """
        key = announced.key
        later = key.exchange not in (0, EVALUATORS)
        asked = self.answered if later else asked
        ready, batch, silent, seconds = wait_for_batch(self.shuffler, key, asked, self.settings, self.say, self._number)
        if not ready:
            self.shuffler.cancel(key)
            traffic.heard(asked, batch.clients, silent)
            self.dropped |= set(batch.missing)
            whom = f"the {asked} that began the round" if later else f"{asked} clients"
            missing = f", missing: {', '.join(batch.missing)}" if batch.missing else ""
            raise TooFew(
                f"{batch.clients} of {whom} answered within {seconds:.0f} s{missing}; "
                "too few for the shuffler to release their rows"
            )
        rows = self.shuffler.release(announced)
        masks, more = b"", FRAME_BYTES
        if isinstance(schema, SumSchema):
            masks, more = self.shuffler.masks(announced, schema.numbers), SEED_BYTES + FRAME_BYTES
        self.shuffler.forget(key)
        self.answered = batch.clients if key.exchange == 0 else self.answered
        traffic.heard(asked, batch.clients, silent)
        return Mixed(rows, schema, announced, sum(map(len, rows)) + more * batch.clients, masks)

    def schema(self, message: Message) -> RowSchema | SumSchema:
        """What rows of replies to the message look like, by an answer of nobody to it."""
        nobody = ClientRound(0, *self._made_up_sample(), Randomness.simulated(0))
        (reply,) = self.method.answer(self.task, message, [nobody])
        if self.method.secure_sum:
            summand = self.method.summand(self.task, message, reply)
            return SumSchema.of(reply.kind, summand, self.settings.clients_per_round)
        return RowSchema.of(self.method, reply)

    def batch(self, key: BatchKey, cohort: Sequence[int], schema: RowSchema | SumSchema) -> Batch:
        return self._asking(key, tuple(self._names[client] for client in cohort), schema)

    def _asking(self, key: BatchKey, names: tuple[str, ...], schema: RowSchema | SumSchema) -> Batch:
        rows = schema.rows(self.settings.max_rows)
        least, seconds = least_of(key, self.peers.shuffler.min_clients), self.settings.round_seconds
        numbers = schema.numbers if isinstance(schema, SumSchema) else 0
        return Batch(key, names, rows, schema.sealed_bytes, least, seconds, numbers)

    def announce(self, said: Announcement, traffic: Traffic) -> bytes:
        """Publish; the bytes every client gets."""
        signed = said.sign(self.signer, self.federation, self.run)
        self.shuffler.publish(signed)
        return signed

    def evaluate(self, message: Message, cohort: Sequence[int]) -> list[Message]:
        """Counts by evaluators, one report of each or one secure sum of all; or else by the round's clients, one row
        per sample or one secure sum.
        """
        apart, summed = bool(self.settings.evaluators), self.peers.terms.sum_counts
        key = BatchKey(self._round, EVALUATORS if apart and summed else EVALUATION)
        names, there = tuple(self._names[client] for client in cohort), len(cohort)
        if apart:
            found = self.shuffler.presence("evaluator")
            names, there = tuple(found.clients), len(found.clients) - len(found.lapsed)
        least = LEAST_EVALUATORS if summed else 1
        if apart and there < least:
            raise TooFew(f"evaluators that are there: {there} of {least} that are needed")
        schema = self._counts_schema(message, len(names))
        batch = None if apart and not summed else self._asking(key, names, schema)
        signed = self.announce(Announcement("evaluate", key, batch, message, self.opener.public), Traffic())
        announced = Announced.of(key, signed)
        if batch is not None:
            released = self._collect(announced, schema, len(names), Traffic())
            if isinstance(schema, SumSchema):
                try:
                    total = self.open_total(released)
                except MessageError as error:
                    raise TooFew(str(error)) from None
                return [total_counts(message.round, total.arrays, self.peers.terms.real_targets)]
            return self._read_counts(message.round, released.rows, announced)
        wanted = min(there, self.settings.evaluators)
        reports = wait_for_reports(self.shuffler, key, wanted, self.settings.round_seconds, self.say, self._number)
        return self._read_counts(message.round, reports, announced)

    def _counts_schema(self, message: Message, clients: int) -> RowSchema | SumSchema:
        (row,) = score_rows(self.task, message, *self._made_up_sample())
        if self.method.secure_sum or self.peers.terms.sum_counts:
            most = SUMMED_SAMPLES if self.settings.evaluators else self.method.sum_samples
            return SumSchema.of(row.kind, counts_summand(row, most), clients)
        return RowSchema(row.kind, row.header(), b"", len(row.encode()) + SEAL_BYTES, sampled=True)

    def _read_counts(self, round: int, sealed: Sequence[bytes], announced: Announced) -> list[Message]:
        reports = []
        for sealed_row in set(sealed):
            try:
                plain = open_row(self.opener, sealed_row, self.federation, self.run, announced)
                reports += [] if is_padding(plain) else [Message.decode(plain)]
            except (MessageError, TrustError) as error:
                self.say(f"round {round}: counts were dropped: {error}")
        return reports

    def notes(self, cohort: Sequence[int]) -> dict[str, Any]:
        return super().notes(cohort) | {"protocol_round": self._round}

    def finish(self) -> None:
        """The run's rounds are played, and never again: that is on the disk before clients hear of it."""
        mark_ended(self._folder, self.run)
        self.announce(Announcement("end", BatchKey(self._next_round(), 0)), Traffic())

    def _made_up_sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.zeros(1, *self._inputs, dtype=self.task.like.dtype)
        real = self.peers.terms.real_targets
        return x, torch.zeros(1, self.task.outputs, dtype=x.dtype) if real else torch.zeros(1, dtype=torch.int64)


def drawn_from(present: Sequence[str], lapsed: Collection[str], dropped: Collection[str], wanted: int) -> list[str]:
    """Of those present (sorted), the ones that a cohort of `wanted` is drawn from: no lapsed and no dropped ones while
    there are enough others. Where there are not, they fill up what is missing: dropped ones first, which are there.
    """
    names = [name for name in present if name not in lapsed and name not in dropped]
    others = sorted((name for name in present if name not in names), key=lambda name: (name in lapsed, name))
    return sorted(names + others[: max(0, wanted - len(names))])
