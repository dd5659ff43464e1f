"""The server of a run: one round after another, each in the run's folder before the next begins.

A round: draw a cohort → drive the method, replies parsed and checked → evaluate → record → checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ntkfl.errors import ConfigError, Diverged, NumericalError, TooFew
from ntkfl.federation.evaluation import ADVICE, OwnTestSet, Score, failure
from ntkfl.federation.run import Run
from ntkfl.federation.run_folder import Record, RunFolder
from ntkfl.federation.seeds import seeded_torch
from ntkfl.federation.server_state import ServerState, draw_cohort
from ntkfl.federation.transport import Traffic, Transport
from ntkfl.federation.validation import NOT_FINITE, filter_replies
from ntkfl.methods import Method, Outcome, State, Task
from ntkfl.methods.base import Outgoing
from ntkfl.progress import plural
from ntkfl.tangent.parameters import eager
from ntkfl.wire import Message

OnRound = Callable[[Record, Record], None]


class Server:
    """Trains `model` by `method` with the clients that `transport` reaches.

    With a `seed`, cohorts and what torch draws follow from it, and so does the whole run of a simulation. Without one
    the transport says who takes part, and nothing is drawn here. Without an `evaluator` records have no score.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        method: Method,
        transport: Transport,
        evaluator: OwnTestSet | None,
        *,
        clients_per_round: int,
        seed: int | None = None,
    ) -> None:
        self.model, self.task, self.method, self.transport, self.evaluator = model, task, method, transport, evaluator
        self.clients_per_round, self.seed = clients_per_round, seed
        with self._drawing(0):
            self.state = ServerState(task, method)

    @cached_property
    def constant(self) -> Record:
        """Accuracy (none for real targets) and loss of the best constant prediction; empty where nobody can tell."""
        return {} if self.evaluator is None else self.evaluator.constant(self.task)

    def run(
        self, folder: RunFolder | None, settings: Mapping[str, Any], *, resume: bool, on_round: OnRound | None = None
    ) -> Run:
        """Play `settings["rounds"]` rounds, or as far as `settings["stop_at"]` asks. With a folder, the run is kept
        there after every round, and `resume` goes on from it.
        """
        with folder.locked() if folder else nullcontext():
            history, timings = self._rounds(folder, settings, resume, on_round)
            trained = self.state.trained(self.model)
            if folder:
                with eager(trained) as own:
                    folder.save_model(own.state_dict())
        return Run(trained, history, timings, settings, self.checkpoint(), self.method)

    def _rounds(
        self, folder: RunFolder | None, settings: Mapping[str, Any], resume: bool, on_round: OnRound | None
    ) -> tuple[list[Record], list[Record]]:
        rounds, stop_at = int(settings["rounds"]), settings.get("stop_at")
        history, timings, tensors = folder.open(settings, resume) if folder else ([], [], {})
        if tensors:
            self.restore(tensors)
        for number in range(len(history) + 1, rounds + 1):
            if stop_at is not None and history and (history[-1]["test_accuracy"] or 0.0) >= stop_at:
                break
            try:
                record, timing = self.play(number)
            except (NumericalError, Diverged) as error:
                error.add_note(f"training diverged: {ADVICE}")
                raise
            history.append(record)
            if (worse := failure(history, self.constant)) and not failure(history[:-1], self.constant):
                record["warning"] = "; ".join([*([record["warning"]] if "warning" in record else []), worse])
            timings.append(timing)
            if folder:
                folder.append("history.jsonl", record)
                folder.append("timings.jsonl", timing)
                folder.save_checkpoint(number, self.checkpoint())
            if on_round:
                on_round(record, timing)
        return history, timings

    def _drawing(self, number: int) -> AbstractContextManager[None]:
        """What torch draws in a round, in the clients of this process too."""
        return nullcontext() if self.seed is None else seeded_torch(self.task.like.device, self.seed, number)

    def play(self, number: int) -> tuple[Record, Record]:
        """One round: (record, timing)."""
        with self._drawing(number):
            began, cohort = time.perf_counter(), self._cohort(number)
            outcome, traffic = self.attempt(number, cohort)
            evaluation = time.perf_counter()
            try:
                self.state.advance(outcome)
                record = self._record(number, cohort, outcome, traffic)
            finally:
                self.transport.end()
        now, device = time.perf_counter(), self.task.like.device
        return record, {
            "round": number,
            "seconds": now - began,
            "client_seconds": traffic.client_seconds,
            "server_seconds": evaluation - began - traffic.client_seconds,
            "evaluation_seconds": now - evaluation,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        }

    def attempt(self, number: int, cohort: Sequence[int]) -> tuple[Outcome, Traffic]:
        """The method's round with these clients. The state stays as it is; where it succeeds, `transport.end` is still
        to come.
        """
        traffic = Traffic()
        self.transport.begin(number, cohort)
        try:
            return self._driven(number, cohort, traffic), traffic
        except BaseException:
            self.transport.end()
            raise

    def _cohort(self, number: int) -> list[int]:
        available = list(self.transport.available(self.clients_per_round))
        if self.seed is None:
            return available
        return [available[i] for i in draw_cohort(self.seed, len(available), self.clients_per_round, number)]

    def _driven(self, number: int, cohort: Sequence[int], traffic: Traffic) -> Outcome:
        """The method's generator driven to its end."""
        generator = self.method.round(self.task, self.state.state, number, cohort)
        if not isinstance(generator, Generator):
            raise ConfigError(f"{self.method.name}: `round` has no yield: it must yield a message, return an Outcome")
        question = next(generator)
        while True:
            messages = self.transport.exchange(question, cohort, traffic)
            try:
                question = generator.send(self._parsed(question, messages, traffic))
            except StopIteration as end:
                return _checked(self.method, self.task, end.value)

    def _parsed(self, question: Outgoing, messages: list[Message], traffic: Traffic) -> list[Any]:
        """The replies in these messages, without those that a round cannot be built from."""
        anonymous = self.transport.anonymous
        kind = self.method.replies[(question if isinstance(question, Message) else next(iter(question.values()))).kind]
        filtered = filter_replies(kind, self.task, messages)
        traffic.rejected += filtered.rejected
        traffic.reasons = filtered.reasons | traffic.reasons
        traffic.rejected_clients += 0 if anonymous else filtered.touched
        why = why_rejected(traffic.rejected, traffic.reasons)
        if not filtered.replies:
            diverged = set(filtered.rejected) == {NOT_FINITE} and not anonymous
            raise (Diverged if diverged else TooFew)(f"nothing that clients sent could be used: {why}")
        self.transport.accepted(filtered.replies)
        return filtered.replies

    def _record(self, number: int, cohort: Sequence[int], outcome: Outcome, traffic: Traffic) -> Record:
        score, own = self._measured()
        if self.state.average.tentative is not None and not math.isfinite(score.loss or 0.0):
            self.state.average.tentative = None  # a step that the next cohort will take back
            score, own = self._measured()
        if score.loss is not None and not math.isfinite(score.loss):
            raise NumericalError(f"the test loss of round {number} is not finite: the training diverged")
        names = [self.transport.name(client) for client in cohort]
        record = record_of(number, score, outcome, traffic, names) | own
        if self.transport.anonymous:
            record["dropped_rows"] = traffic.rejected.total()
        return record | outcome.diagnostics | self.transport.notes(cohort)

    def _measured(self) -> tuple[Score, dict[str, Any]]:
        return (Score(None, None, 0), {}) if self.evaluator is None else self.evaluator.measure(self.state)

    def checkpoint(self) -> State:
        return self.state.checkpoint() | self.transport.checkpoint()

    def restore(self, tensors: State) -> None:
        self.state.restore(tensors)
        self.transport.restore(tensors)


def _checked(method: Method, task: Task, outcome: object) -> Outcome:
    """What `round` returned, if the server can go on from it: else an error that says what a method must return."""
    if not isinstance(outcome, Outcome):
        raise ConfigError(f"{method.name}: `round` must return an Outcome, not {outcome!r:.80}")
    weights, d = outcome.state.get("weights"), task.like.numel()
    if not isinstance(weights, Tensor) or weights.shape != (d,):
        found = "none" if weights is None else f"{list(getattr(weights, 'shape', []))}"
        raise ConfigError(f"{method.name}: the Outcome's state must have 'weights' of shape [{d}], found {found}")
    return outcome if outcome.train_loss is None else replace(outcome, train_loss=float(outcome.train_loss))


def record_of(number: int, score: Score, outcome: Outcome, traffic: Traffic, clients: Sequence[int | str]) -> Record:
    """What every record says of its round. `failed` (clients by name, with the reason), `rejected` (rows or updates by
    reason), `rejected_why` and `repeated_rows` are there only where there were some.
    """
    lost = {
        "rejected": dict(traffic.rejected),
        "rejected_why": dict(traffic.reasons),
        "repeated_rows": traffic.repeated,
        "rejected_clients": traffic.rejected_clients,
        "failed": dict(traffic.failed),
    }
    return {
        "round": number,
        "test_accuracy": score.accuracy,
        "test_loss": score.loss,
        "train_loss": outcome.train_loss,
        "steps": outcome.steps,
        "uplink_bytes": traffic.uplink.total(),
        "downlink_bytes": traffic.downlink.total(),
        "clients": list(clients),
        "uplink": dict(traffic.uplink),
        "downlink": dict(traffic.downlink),
    } | {name: value for name, value in lost.items() if value}


def why_rejected(rejected: Mapping[str, int], reasons: Mapping[str, str]) -> str:
    """Counts by reason in words, each with the first error: "8 malformed (a label that is none of the 10 classes)"."""
    counts = [
        f"{n} {what}" + (f" ({reasons[what]})" if what in reasons else "") for what, n in sorted(rejected.items())
    ]
    return ", ".join(counts) or "nothing came"


def remarks(record: Record) -> list[str]:
    """What a round had to leave out, or to do otherwise than meant, as lines for a log."""
    said = []
    if record.get("failed"):
        said.append(f"no answer: {'; '.join(f'{name}: {why}' for name, why in record['failed'].items())}")
    if record.get("rejected"):
        said.append(f"rejected: {why_rejected(record['rejected'], record.get('rejected_why', {}))}")
    if record.get("bounded_clients"):
        clients = plural(record["bounded_clients"], "client")
        said.append(f"{clients} scaled numbers down to the limit of a secure sum")
    if record.get("taken_back"):
        said.append("the last step raised this cohort's loss: it is taken back, and repeated shorter")
    texts = (("warning", "warning"), ("solver", "solver_fallback"))
    return said + [f"{what}: {record[name]}" for what, name in texts if record.get(name)]
