"""The server of a run: one round after another, each in the run's folder before the next begins.

A round: draw a cohort → drive the method over the transport, validating replies → evaluate → record → checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from ntkfl.errors import Diverged, MessageError, NumericalError, OutOfRounds, TooFew
from ntkfl.federation.chance import advice, warning
from ntkfl.federation.evaluation import Evaluator
from ntkfl.federation.round_driver import drive
from ntkfl.federation.run import Run
from ntkfl.federation.run_folder import Record, RunFolder
from ntkfl.federation.seeds import seeded_torch
from ntkfl.federation.server_state import ServerState, attempt_labels, draw_cohort
from ntkfl.federation.transport import Traffic, Transport
from ntkfl.federation.validation import NOT_FINITE, filter_replies
from ntkfl.methods import Method, Outcome, State, Task, batchnorm
from ntkfl.methods.base import Outgoing
from ntkfl.progress import plural
from ntkfl.tangent.parameters import eager
from ntkfl.wire import Message

OnRound = Callable[[Record, Record], None]


class Played(NamedTuple):
    """A round that succeeded: why earlier attempts failed, with which clients, what it ended with and what it sent."""

    failed_attempts: Sequence[str]
    cohort: Sequence[int]
    outcome: Outcome
    traffic: Traffic


class Server:
    """Trains `model` by `method` with the clients that `transport` reaches. Of a deployment, a round that fails for
    want of clients or usable replies is tried again with others, `attempts` times in all.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        method: Method,
        transport: Transport,
        evaluator: Evaluator,
        *,
        clients_per_round: int,
        seed: int,
        attempts: int = 1,
        deployed: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.model, self.task, self.method, self.transport, self.evaluator = model, task, method, transport, evaluator
        self.clients_per_round, self.seed, self.attempts = clients_per_round, seed, attempts
        self.deployed, self.say = deployed, say
        with self._drawing(0):
            self.state = ServerState(task, method)
        self._gathered = False
        self._waited = 0.0  # seconds, in attempts at this round that failed

    @cached_property
    def constant(self) -> Record:
        """Accuracy (none for real targets) and loss of the best constant prediction; empty where nobody can tell."""
        best = self.evaluator.constant(self.task)
        known = {} if best is None else {"accuracy": best.accuracy, "loss": best.loss}
        return {name: value for name, value in known.items() if value is not None}

    def run(
        self, folder: RunFolder | None, settings: Mapping[str, Any], *, resume: bool, on_round: OnRound | None = None
    ) -> Run:
        """Play `settings["rounds"]` rounds, or as far as `settings["stop_at"]` asks. With a folder, the run is kept
        there after every round, and `resume` goes on from it.
        """
        # A simulation tells its callbacks.
        for line in batchnorm.advice(self.method, self.task) if self.deployed else []:
            self.say(f"warning: {line}")
        with folder.locked() if folder else nullcontext():
            history, timings = self._rounds(folder, settings, resume, on_round)
            trained = self.state.trained(self.model)
            if folder:
                with eager(trained) as own:
                    folder.save_model(own.state_dict())
            self.transport.finish()
        return Run(trained, history, timings, settings, self.checkpoint(), self.method)

    def _rounds(
        self, folder: RunFolder | None, settings: Mapping[str, Any], resume: bool, on_round: OnRound | None
    ) -> tuple[list[Record], list[Record]]:
        rounds, stop_at = int(settings["rounds"]), settings.get("stop_at")
        history, timings, tensors = folder.open(settings, resume) if folder else ([], [], {})
        if tensors:
            self.restore(tensors)
            self.say(f"goes on after round {len(history)}")
        for number in range(len(history) + 1, rounds + 1):
            if stop_at is not None and history and (history[-1]["test_accuracy"] or 0.0) >= stop_at:
                break
            try:
                record, timing = self.play(number)
            except (NumericalError, Diverged) as error:
                error.add_note(f"training diverged: {advice(self.method)}")
                raise
            history.append(record)
            if said := warning(history, self.constant, self.method):
                record["warning"] = "; ".join([*([record["warning"]] if "warning" in record else []), said])
            timings.append(timing)
            if folder:
                folder.append("history.jsonl", record)
                folder.append("timings.jsonl", timing)
                folder.save_checkpoint(number, self.checkpoint())
            if on_round:
                on_round(record, timing)
        return history, timings

    def _drawing(self, number: int) -> AbstractContextManager[None]:
        """What torch draws in a round of a simulation, in its clients too, follows from the seed. In a deployment
        nothing does: others know the seed.
        """
        return nullcontext() if self.deployed else seeded_torch(self.task.like.device, self.seed, number)

    def play(self, number: int) -> tuple[Record, Record]:
        """One round: (record, timing)."""
        with self._drawing(number):
            return self._play(number)

    def _play(self, number: int) -> tuple[Record, Record]:
        if not self._gathered:
            self.transport.gather()
            self._gathered = True
        began = time.perf_counter()
        played = self._round(number)
        evaluation = time.perf_counter()
        try:
            record = self._record(number, played)
        except BaseException:
            self.transport.end(completed=False)
            raise
        self.transport.end(completed=True)
        now = time.perf_counter()
        device, client_seconds = self.task.like.device, played.traffic.client_seconds
        waited = played.traffic.waited_seconds
        return record, {
            "round": number,
            "seconds": now - began,
            "client_seconds": client_seconds,
            "server_seconds": evaluation - began - client_seconds,
            "evaluation_seconds": now - evaluation,
            **({"waited_seconds": waited} if waited else {}),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        }

    def _round(self, number: int) -> Played:
        """The first attempt that succeeds; the state is what it ended with."""
        failed: list[str] = []
        self._waited = 0.0
        for attempt in range(self.attempts):
            try:
                cohort = self._cohort(number, attempt)
                outcome, traffic = self.attempt(number, cohort)
                self.state.advance(outcome)
                traffic.waited_seconds += self._waited
                return Played(failed, cohort, outcome, traffic)
            except OutOfRounds:
                raise
            except TooFew as error:
                if not self.deployed:
                    raise
                failed.append(str(error))
                self.say(f"round {number}, attempt {attempt + 1} of {self.attempts} failed: {error}")
        raise TooFew(f"round {number} failed {self.attempts} times; start again to go on from the last")

    def _cohort(self, number: int, attempt: int) -> list[int]:
        there = self.transport.available(self.clients_per_round)
        labels = attempt_labels(number, attempt)
        return [there[i] for i in draw_cohort(self.seed, len(there), self.clients_per_round, *labels)]

    def attempt(self, number: int, cohort: Sequence[int]) -> tuple[Outcome, Traffic]:
        """The method's round with these clients, replies validated; the state stays as it is."""
        traffic = Traffic()

        def exchange(message: Outgoing) -> list[Message]:
            replies = self._validated(self.transport.exchange(message, cohort, traffic), traffic)
            self.transport.accepted(replies)
            return replies

        self.transport.begin(number, cohort)
        try:
            return drive(self.method, self.task, self.state.state, number, cohort, exchange), traffic
        except BaseException as error:
            self._waited += traffic.waited_seconds
            self.transport.end(completed=False)
            if self.transport.anonymous and isinstance(error, MessageError | NumericalError):
                # Rows that pass for good and are not, and nobody knows whose: ask others.
                raise TooFew(f"the round cannot be built from its rows: {error}") from None
            raise

    def _validated(self, replies: list[Message], traffic: Traffic) -> list[Message]:
        """The replies without the rows, or without the clients, that a round cannot be built from. One that is a secure
        sum stands for many.
        """
        anonymous, quorum = self.transport.anonymous, 1 if self.method.secure_sum else self.transport.quorum
        filtered = filter_replies(self.method, self.task, replies)
        traffic.rejected += filtered.rejected
        traffic.rejected_clients += 0 if anonymous else filtered.touched
        why = why_rejected(traffic.rejected)
        if not filtered.replies:
            diverged = set(filtered.rejected) == {NOT_FINITE} and not anonymous
            raise (Diverged if diverged else TooFew)(f"nothing that clients sent could be used: {why}")
        count, what = (filtered.rows, "rows") if anonymous else (len(filtered.replies), "replies")
        if count < quorum:
            raise TooFew(f"{count} {what} could be used, below the quorum of {quorum}: {why}")
        return filtered.replies

    def _record(self, number: int, played: Played) -> Record:
        failed_attempts, cohort, outcome, traffic = played
        score, own = self.evaluator.measure(self.state, number, cohort)
        if self.state.average.tentative is not None and not math.isfinite(score.loss or 0.0):
            self.state.average.tentative = None  # a step that the next cohort will take back
            score, own = self.evaluator.measure(self.state, number, cohort)
        if score.loss is not None and not math.isfinite(score.loss):
            raise NumericalError(f"the test loss of round {number} is not finite: the training diverged")
        names = [self.transport.name(client) for client in cohort]
        record = record_of(number, score.accuracy, score.loss, outcome, traffic, names) | own
        if self.deployed:
            record |= {"attempt": len(failed_attempts), "evaluated_samples": score.samples}
            record |= {"failed_attempts": list(failed_attempts)} if failed_attempts else {}
        if self.transport.anonymous:
            record["dropped_rows"] = traffic.dropped
        return record | outcome.diagnostics | self.transport.notes(cohort)

    def checkpoint(self) -> State:
        return self.state.checkpoint() | self.transport.checkpoint()

    def restore(self, tensors: State) -> None:
        self.state.restore(tensors)
        self.transport.restore(tensors)


def record_of(
    number: int,
    accuracy: float | None,
    loss: float | None,
    outcome: Outcome,
    traffic: Traffic,
    clients: Sequence[int | str],
) -> Record:
    """What every record says of its round; `failed` only where a client did, by name and with the reason, `rejected`
    only where rows or updates were, by reason, `repeated_rows` only where there were some, and `asked` and `answered`
    only where clients may stay away.
    """
    rejected: Record = {"rejected": dict(traffic.rejected)} if traffic.rejected else {}
    if traffic.repeated:
        rejected["repeated_rows"] = traffic.repeated
    if traffic.rejected_clients:
        rejected["rejected_clients"] = traffic.rejected_clients
    return (
        {
            "round": number,
            "test_accuracy": accuracy,
            "test_loss": loss,
            "train_loss": outcome.train_loss,
            "steps": outcome.steps,
            "uplink_bytes": traffic.uplink.total(),
            "downlink_bytes": traffic.downlink.total(),
            "clients": list(clients),
            "uplink": dict(traffic.uplink),
            "downlink": dict(traffic.downlink),
        }
        | ({"asked": traffic.asked, "answered": traffic.answered} if traffic.asked else {})
        | rejected
        | ({"failed": dict(traffic.failed)} if traffic.failed else {})
    )


def why_rejected(rejected: Mapping[str, int]) -> str:
    """Counts by reason in words."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(rejected.items())) or "nothing came"


def remarks(record: Record, timing: Record | None = None) -> list[str]:
    """What a round had to leave out, or to do otherwise than meant, as lines for a log."""
    said = []
    if record.get("answered", 0) < record.get("asked", 0):
        absent = ", ".join(record.get("failed", ())) or str(record["asked"] - record["answered"])
        seconds = (timing or {}).get("waited_seconds")
        waited = f"; waited {seconds:.0f} s for {absent}" if seconds and seconds >= 0.5 else ""
        said.append(f"{record['answered']} of {record['asked']} clients answered{waited}")
    if record.get("rejected"):
        said.append(f"rejected: {why_rejected(record['rejected'])}")
    if record.get("bounded_clients"):
        clients = plural(record["bounded_clients"], "client")
        said.append(f"{clients} scaled numbers down to the limit of a secure sum")
    if record.get("taken_back"):
        said.append("the last step raised this cohort's loss: it is taken back, and repeated shorter")
    texts = (("warning", "warning"), ("solver", "solver_fallback"))
    return said + [f"{what}: {record[name]}" for what, name in texts if record.get(name)]
