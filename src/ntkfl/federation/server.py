"""The server of a run: one round after another, each in the run's folder before the next begins.

A round: draw a cohort → drive the method, replies parsed and checked → evaluate → record → checkpoint.
`ServerState` is what a checkpoint holds, `OwnTestSet` measures it, and `Server` plays the rounds.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ntkfl.errors import ConfigError, Diverged, NumericalError, RunFolderError, TooFew
from ntkfl.federation.client import Batch, derive, seeded_torch
from ntkfl.federation.run_folder import Record, RunFolder
from ntkfl.federation.transport import Traffic, Transport
from ntkfl.federation.validation import NOT_FINITE, filter_replies
from ntkfl.methods import Method, Outcome, State, Task
from ntkfl.methods.base import Outgoing
from ntkfl.methods.task import STATISTICS, load_statistics
from ntkfl.progress import plural
from ntkfl.tangent.losses import LOSSES, per_sample, targets
from ntkfl.tangent.parameters import eager, load_flat
from ntkfl.wire import Message

OnRound = Callable[[Record, Record], None]
ADVICE = "take shorter steps (lr, local_steps, time or mu); inputs should be near mean 0 and deviation 1"


class RunningAverage:
    """The weights that are reported and saved; training never goes on from them.

    w̄ ← e w̄ + (1−e) w with e = min(cap, n/(n+5)) for the n-th weights, from 0: the first count whole, all fade.
    """

    def __init__(self, start: Tensor, cap: float) -> None:
        self.settled, self.cap, self.count = start.clone(), cap, 0
        self.tentative: Tensor | None = None  # counts in `value` until it is replaced

    @property
    def value(self) -> Tensor:
        """w̄ [d], the tentative weights included."""
        return self.settled if self.tentative is None else self._with(self.tentative)

    def add(self, weights: Tensor) -> None:
        """Count these weights [d] for good."""
        self.settled = self._with(weights)
        self.count += 1

    def _with(self, weights: Tensor) -> Tensor:
        """What w̄ becomes with these weights as the n-th."""
        e = min(self.cap, self.count / (self.count + 5))
        return e * self.settled + (1 - e) * weights


class ServerState:
    """The method's state and the running average of its weights: what a checkpoint holds."""

    def __init__(self, task: Task, method: Method) -> None:
        self.task, self.method = task, method
        self.state = method.start(task, task.like)
        self.average = RunningAverage(self.flat_weights(), method.average)

    def advance(self, outcome: Outcome) -> None:
        """Take over what a round ended with, sorted by name as `restore` does: equal states give equal bytes."""
        self.state = dict(sorted(outcome.state.items()))
        if outcome.passed is not None:
            self.average.add(self.flat_weights(outcome.passed))
        self.average.tentative = self.flat_weights() if outcome.tentative else None
        if not outcome.tentative:
            self.average.add(self.flat_weights())

    def flat_weights(self, weights: Tensor | None = None) -> Tensor:
        """The state's weights [d], or others, followed by the batch normalisation statistics averaged with them."""
        first = self.state["weights"] if weights is None else weights
        return torch.cat([first, *([self.state[STATISTICS]] if STATISTICS in self.state else [])])

    def parts(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [d], statistics [b]) of what `flat_weights` gives; b is 0 for a network without any."""
        d = self.task.like.numel()
        return flat[:d], flat[d:]

    def evaluate(self, batch: Batch, *flat: Tensor) -> list[tuple[float | None, float]]:
        """(accuracy, mean loss) of each of these weights and statistics; no accuracy for real-valued targets."""
        x, y = batch
        outputs = []
        for weights, own in map(self.parts, flat):
            if len(own):
                load_statistics(self.task.model, own)
            outputs.append(self.task.predict(weights, x))
        losses = [self.task.losses(f, y).double().mean() for f in outputs]
        if y.is_floating_point():
            return [(None, float(loss)) for loss in losses]
        right = [(f.argmax(1) == y).double().mean() for f in outputs]
        return [(float(accuracy), float(loss)) for accuracy, loss in zip(right, losses, strict=True)]

    def trained(self, model: nn.Module) -> nn.Module:
        """A copy of `model` with the averaged weights and statistics."""
        result = copy.deepcopy(model)
        weights, own = self.parts(self.average.value.to(next(result.parameters()).device))
        load_flat(result, weights)
        if len(own):
            load_statistics(result, own)
        return result

    def checkpoint(self) -> State:
        """All that `restore` needs, by name: the method's state and the average. A tentative step is not stored twice:
        it is the state's own weights.
        """
        return {f"state/{name}": t for name, t in self.state.items()} | {
            "averaged": self.average.settled,
            "averages": torch.tensor(self.average.count),
            "tentative": torch.tensor(self.average.tentative is not None),
        }

    def restore(self, tensors: State) -> None:
        """Go on from a checkpoint; `RunFolderError` if it belongs to another model."""
        placed = {name: t.to(self.task.like.device) for name, t in tensors.items()}
        own = self.checkpoint()
        for name in ("averaged", "averages", "tentative", "state/weights"):
            if name not in placed or placed[name].shape != own[name].shape:
                raise RunFolderError("the checkpoint is not of this model: it cannot be resumed from")
        self.average.settled, self.average.count = placed["averaged"], int(placed["averages"])
        self.state = {k.removeprefix("state/"): t for k, t in sorted(placed.items()) if k.startswith("state/")}
        self.average.tentative = self.flat_weights() if bool(placed["tentative"]) else None


@dataclass(frozen=True)
class Score:
    """Over all samples counted; no accuracy for real-valued targets, and None where nothing was measured."""

    accuracy: float | None
    loss: float | None
    samples: int


class OwnTestSet:
    """Measures on a test set of the server's; with `validation`, on held-out clients' samples too."""

    def __init__(self, test: Batch, validation: Batch | None = None) -> None:
        self.test, self.validation = test, validation

    def constant(self, task: Task) -> Record:
        """Accuracy (of classes) and loss of the best constant prediction: the mean target, under cross-entropy taken
        as probabilities. Empty for a loss of the user's own.
        """
        y = self.test[1]
        if task.loss not in LOSSES:
            return {}
        Y = targets(y, task.outputs, task.loss, torch.float64)
        mean = Y.mean(0)
        best = mean.clamp_min(1e-300).log() if task.loss == "ce" else mean
        accuracy = {} if y.is_floating_point() else {"accuracy": float(mean.max())}
        return accuracy | {"loss": float(per_sample(task.loss, best.expand_as(Y), Y).mean())}

    def measure(self, state: ServerState) -> tuple[Score, Record]:
        """(the score of the averaged weights, what else the round's record says of it)."""
        averaged = state.average.value
        # The trajectory does not depend on averaging, so one run tells both curves.
        last = [state.flat_weights()] if state.method.average else []
        scores = state.evaluate(self.test, averaged, *last)
        (accuracy, loss), more = scores[0], Record(last_accuracy=scores[-1][0])
        if self.validation is not None:
            ((more["validation_accuracy"], more["validation_loss"]),) = state.evaluate(self.validation, averaged)
        return Score(accuracy, loss, len(self.test[1])), more


def failure(history: Sequence[Record], constant: Mapping[str, Any] | None) -> str:
    """Why a model is worth nothing after these rounds; empty where it is worth something.

    It is worse than the best constant prediction (`constant`: its loss, and its accuracy for classes) in accuracy, and
    in loss by a factor of 10, or after five rounds of 1.05. A model that forgot a client since has no scores.
    """
    if not constant or not history or (loss := history[-1]["test_loss"]) is None:
        return ""
    accuracy, limit = history[-1]["test_accuracy"], constant["loss"] * (1.05 if len(history) >= 5 else 10.0)
    if ("accuracy" in constant and accuracy > constant["accuracy"]) or not loss > limit > 0:
        return ""
    scores = f"test loss {loss:.4g}, and a constant has {constant['loss']:.4g}"
    return f"the model is worse than a constant prediction: {scores}: {ADVICE}"


class Server:
    """Trains `model` by `method` with the clients that `transport` reaches.

    With a `seed`, cohorts and what torch draws follow from it, and so does the whole run of a simulation. Without one
    the transport says who takes part, and nothing is drawn here. Without an `evaluator` records have no score.
    `count_attempts` is for noise that is drawn anew each time: rounds that failed count for ε (`task.failed_rounds`).
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
        count_attempts: bool = False,
    ) -> None:
        self.model, self.task, self.method, self.transport, self.evaluator = model, task, method, transport, evaluator
        self.clients_per_round, self.seed, self.count_attempts = clients_per_round, seed, count_attempts
        self.constant: Record = {} if evaluator is None else evaluator.constant(task)
        self._attempts = 0
        with self._drawing(0):
            self.state = ServerState(task, method)

    def run(
        self, folder: RunFolder | None, settings: Mapping[str, Any], *, resume: bool, on_round: OnRound | None = None
    ) -> tuple[nn.Module, list[Record], list[Record]]:
        """Play `settings["rounds"]` rounds, or as far as `settings["stop_at"]` asks: (model, history, timings).

        With a folder, the run is kept there after every round, and `resume` goes on from it.
        """
        with folder.locked() if folder else nullcontext():
            history, timings = self._rounds(folder, settings, resume, on_round)
            trained = self.state.trained(self.model)
            if folder:
                with eager(trained) as own:
                    folder.save_model(own.state_dict())
        return trained, history, timings

    def _rounds(
        self, folder: RunFolder | None, settings: Mapping[str, Any], resume: bool, on_round: OnRound | None
    ) -> tuple[list[Record], list[Record]]:
        """Open the folder, and play the rounds that are missing: (history, timings), those found there included.

        A record is written before the checkpoint that counts it. A process killed in between leaves one line too many,
        which the next `open` cuts off: the round is played again, to the same bytes.
        """
        rounds, stop_at = int(settings["rounds"]), settings.get("stop_at")
        history, timings, tensors = folder.open(settings, resume) if folder else ([], [], {})
        if tensors:
            self.restore(tensors)
        for number in range(len(history) + 1, rounds + 1):
            if stop_at is not None and history and (history[-1]["test_accuracy"] or 0.0) >= stop_at:
                break
            self._count_attempt(folder, number)
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

    def _count_attempt(self, folder: RunFolder | None, number: int) -> None:
        """Write the attempt down before any noise is drawn: whatever ends it, what it released counts."""
        if self.count_attempts:
            self._attempts = (folder.attempts if folder else self._attempts) + 1
            self.task.failed_rounds = self._attempts - number
            if folder:
                folder.append("attempts.jsonl", {"round": number})

    def play(self, number: int) -> tuple[Record, Record]:
        """One round: (record, timing). `Diverged`, `NumericalError` or `TooFew` where it cannot be built; the state is
        then as it was, and the round can be played again.
        """
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
        """The method's round with these clients: (its outcome, what was sent and lost).

        The method's `round` is a generator. Each message that it yields goes to the cohort; it is sent the replies,
        parsed and without those that were rejected. The state stays as it is; where the round succeeds,
        `transport.end` is still to come, and where it fails it was called.
        """
        traffic = Traffic()
        self.transport.begin(number, cohort)
        try:
            generator = self.method.round(self.task, self.state.state, number, cohort)
            if not isinstance(generator, Generator):
                raise ConfigError(
                    f"{self.method.name}: `round` has no yield: it must yield a message, return an Outcome"
                )
            question = next(generator)
            # A round has one exchange or more: the method yields a question, and is sent the parsed replies. What it
            # returns in the end is the round's outcome.
            while True:
                messages = self.transport.exchange(question, cohort, traffic)
                try:
                    question = generator.send(self._parsed(question, messages, traffic))
                except StopIteration as end:
                    return _checked(self.method, self.task, end.value), traffic
        except BaseException:
            self.transport.end()
            raise

    def _drawing(self, number: int) -> AbstractContextManager[None]:
        """What torch draws in a round, in the clients of this process too."""
        return nullcontext() if self.seed is None else seeded_torch(self.task.like.device, self.seed, number)

    def _cohort(self, number: int) -> list[int]:
        """The clients of the round, ascending: drawn by the seed, or those that the transport found."""
        available = list(self.transport.available())
        if self.seed is None:
            return available
        return [available[i] for i in draw_cohort(self.seed, len(available), self.clients_per_round, number)]

    def _parsed(self, question: Outgoing, messages: list[Message], traffic: Traffic) -> list[Any]:
        """The replies in these messages, without those that a round cannot be built from."""
        anonymous = self.transport.anonymous
        kind = self.method.replies[(question if isinstance(question, Message) else next(iter(question.values()))).kind]
        filtered = filter_replies(kind, self.task, messages)
        traffic.rejected += filtered.rejected
        traffic.reasons = filtered.reasons | traffic.reasons
        traffic.rejected_clients += 0 if anonymous else filtered.touched
        if not filtered.replies:
            diverged = set(filtered.rejected) == {NOT_FINITE} and not anonymous
            why = why_rejected(traffic.rejected, traffic.reasons)
            raise (Diverged if diverged else TooFew)(f"nothing that clients sent could be used: {why}")
        self.transport.accepted(filtered.replies)
        return filtered.replies

    def _record(self, number: int, cohort: Sequence[int], outcome: Outcome, traffic: Traffic) -> Record:
        """What every record says of its round. `failed` (clients by name, with the reason), `rejected` (rows or
        updates by reason), `rejected_why` and `repeated_rows` are there only where there were some.
        """
        score, more = self._measured()
        if self.state.average.tentative is not None and not math.isfinite(score.loss or 0.0):
            self.state.average.tentative = None  # a step that the next cohort will take back
            score, more = self._measured()
        if score.loss is not None and not math.isfinite(score.loss):
            raise NumericalError(f"the test loss of round {number} is not finite: the training diverged")
        record: Record = {
            "round": number,
            "test_accuracy": score.accuracy,
            "test_loss": score.loss,
            "train_loss": outcome.train_loss,
            "steps": outcome.steps,
            "uplink_bytes": traffic.uplink.total(),
            "downlink_bytes": traffic.downlink.total(),
            "clients": list(cohort),
            "uplink": dict(traffic.uplink),
            "downlink": dict(traffic.downlink),
        }
        lost = {
            "rejected": dict(traffic.rejected),
            "rejected_why": dict(traffic.reasons),
            "repeated_rows": traffic.repeated,
            "rejected_clients": traffic.rejected_clients,
            "failed": dict(traffic.failed),
            "failed_rounds": self.task.failed_rounds,
        }
        record |= {name: value for name, value in lost.items() if value} | more
        if self.transport.anonymous:
            record["dropped_rows"] = traffic.rejected.total()
        return record | outcome.diagnostics | self.transport.notes(cohort)

    def _measured(self) -> tuple[Score, Record]:
        """The model's score now, and what else the record says of it; nothing without an evaluator."""
        return (Score(None, None, 0), {}) if self.evaluator is None else self.evaluator.measure(self.state)

    def checkpoint(self) -> State:
        """What the next round starts from: the server's state, and what clients of this process keep."""
        return self.state.checkpoint() | self.transport.checkpoint()

    def restore(self, tensors: State) -> None:
        """Go on from a checkpoint."""
        self.state.restore(tensors)
        self.transport.restore(tensors)


def draw_cohort(seed: int, count: int, size: int, round: int) -> list[int]:
    """`size` of `count` clients, ascending, drawn for the round: the same for the same seed, and no secret."""
    rng = np.random.Generator(np.random.PCG64(derive(seed, "cohort", round)))
    return sorted(int(i) for i in rng.choice(count, size, replace=False))


def _checked(method: Method, task: Task, outcome: object) -> Outcome:
    """What `round` returned; `ConfigError` that says what a method must return, if the server cannot go on from it."""
    if not isinstance(outcome, Outcome):
        raise ConfigError(f"{method.name}: `round` must return an Outcome, not {outcome!r:.80}")
    weights, d = outcome.state.get("weights"), task.like.numel()
    if not isinstance(weights, Tensor) or weights.shape != (d,):
        found = "none" if weights is None else f"{list(getattr(weights, 'shape', []))}"
        raise ConfigError(f"{method.name}: the Outcome's state must have 'weights' of shape [{d}], found {found}")
    return outcome if outcome.train_loss is None else replace(outcome, train_loss=float(outcome.train_loss))


def why_rejected(rejected: Mapping[str, int], reasons: Mapping[str, str]) -> str:
    """Counts by reason in words, each with the first error: "8 malformed (a label that is none of the 10 classes)"."""
    counts = [
        f"{n} {what}" + (f" ({reasons[what]})" if what in reasons else "") for what, n in sorted(rejected.items())
    ]
    return ", ".join(counts) or "nothing came"


def remarks(record: Record) -> list[str]:
    """What a round had to leave out, or to do otherwise than meant, as lines for a log."""
    lines = []
    if record.get("failed"):
        lines.append(f"no answer: {'; '.join(f'{name}: {why}' for name, why in record['failed'].items())}")
    if record.get("rejected"):
        lines.append(f"rejected: {why_rejected(record['rejected'], record.get('rejected_why', {}))}")
    if record.get("bounded_clients"):
        clients = plural(record["bounded_clients"], "client")
        lines.append(f"{clients} scaled numbers down to the limit of a secure sum")
    if record.get("taken_back"):
        lines.append("the last step raised this cohort's loss: it is taken back, and repeated shorter")
    texts = (("warning", "warning"), ("solver", "solver_fallback"))
    return lines + [f"{what}: {record[name]}" for what, name in texts if record.get(name)]
