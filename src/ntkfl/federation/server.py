"""The server of a run: one round after another, each in the run's folder before the next begins.

A round: draw a cohort → drive the method, replies parsed and checked → evaluate → record → checkpoint.
`ServerState` is what a checkpoint holds, and `Server` plays the rounds.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

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
ADVICE = (
    "inputs, and real-valued targets, should be near mean 0 and deviation 1 (ntkfl train --standardize scales inputs); "
    "then take shorter steps: a smaller lr, time or kl, fewer local_steps or a larger mu, as the method has them"
)


class Score(NamedTuple):
    """Accuracy (none for real-valued targets) and mean loss, and the number of samples behind them."""

    accuracy: float | None
    loss: float
    samples: int

    @staticmethod
    def of(task: Task, outputs: Tensor, y: Tensor) -> Score:
        """Of outputs [n, d2] for samples with these targets."""
        right = None if y.is_floating_point() else float((outputs.argmax(1) == y).double().mean())
        return Score(right, float(task.losses(outputs, y).double().mean()), len(y))


class ServerState:
    """The method's state, and the running average w̄ of its weights: what a checkpoint holds.

    w̄ is reported and saved; training never goes on from it. With e = min(average, n/(n+5)) for the n-th weights, from
    0, w̄ ← e w̄ + (1−e) w: the first count whole, all fade. `settled` is w̄ of weights that count for good; where the
    state's own are `tentative`, `averaged` has them besides.
    """

    def __init__(self, task: Task, method: Method) -> None:
        self.task, self.method = task, method
        self.state = method.start(task, task.like)
        self.settled, self.count, self.tentative = self.flat_weights(), 0, False

    def advance(self, outcome: Outcome) -> None:
        """Take over what a round ended with, sorted by name as `restore` does: equal states give equal bytes."""
        self.state, self.tentative = dict(sorted(outcome.state.items())), outcome.tentative
        ended = [] if outcome.tentative else [self.state["weights"]]
        for weights in ended if outcome.passed is None else [outcome.passed, *ended]:
            self.settled = self._with(weights)
            self.count += 1

    @property
    def averaged(self) -> Tensor:
        """w̄ [d + b], tentative weights included."""
        return self._with(self.state["weights"]) if self.tentative else self.settled

    def _with(self, weights: Tensor) -> Tensor:
        """What w̄ becomes with these weights [d] as the n-th."""
        e = min(self.method.average, self.count / (self.count + 5))
        return e * self.settled + (1 - e) * self.flat_weights(weights)

    def flat_weights(self, weights: Tensor | None = None) -> Tensor:
        """The state's weights [d], or others, followed by the batch normalisation statistics [b] averaged with them."""
        first = self.state["weights"] if weights is None else weights
        return torch.cat([first, *([self.state[STATISTICS]] if STATISTICS in self.state else [])])

    def _load(self, model: nn.Module, flat: Tensor) -> Tensor:
        """Load the statistics of what `flat_weights` gives into the model; the weights [d] of it."""
        weights, statistics = flat.tensor_split([self.task.like.numel()])
        load_statistics(model, {STATISTICS: statistics} if len(statistics) else {})
        return weights

    def score(self, flat: Tensor, batch: Batch) -> Score:
        """Of these weights and statistics on samples (x, y)."""
        weights = self._load(self.task.model, flat)
        return Score.of(self.task, self.task.predict(weights, batch[0]), batch[1])

    def trained(self, model: nn.Module) -> nn.Module:
        """A copy of `model` with the averaged weights and statistics."""
        result = copy.deepcopy(model)
        load_flat(result, self._load(result, self.averaged.to(next(result.parameters()).device)))
        return result

    def checkpoint(self) -> State:
        """All that `restore` needs, by name: the method's state and the average. A tentative step is not stored twice:
        it is the state's own weights.
        """
        return {f"state/{name}": t for name, t in self.state.items()} | {
            "averaged": self.settled,
            "averages": torch.tensor(self.count),
            "tentative": torch.tensor(self.tentative),
        }

    def restore(self, tensors: State) -> None:
        """Go on from a checkpoint; `RunFolderError` if it belongs to another model."""
        placed = {name: t.to(self.task.like.device) for name, t in tensors.items()}
        own = self.checkpoint()
        for name in ("averaged", "averages", "tentative", "state/weights"):
            if name not in placed or placed[name].shape != own[name].shape:
                raise RunFolderError("the checkpoint is not of this model: it cannot be resumed from")
        self.state = {k.removeprefix("state/"): t for k, t in sorted(placed.items()) if k.startswith("state/")}
        self.settled, self.count = placed["averaged"], int(placed["averages"])
        self.tentative = bool(placed["tentative"])


def best_constant(task: Task, y: Tensor) -> Record:
    """Accuracy (of classes) and loss of the best constant prediction of targets y: their mean, under cross-entropy
    taken as probabilities. Empty for a loss of the user's own.
    """
    if task.loss not in LOSSES:
        return {}
    Y = targets(y, task.outputs, task.loss, torch.float64)
    mean = Y.mean(0)
    best = mean.clamp_min(1e-300).log() if task.loss == "ce" else mean
    accuracy = {} if y.is_floating_point() else {"accuracy": float(mean.max())}
    return accuracy | {"loss": float(per_sample(task.loss, best.expand_as(Y), Y).mean())}


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
    """Trains `model` by `method` with the clients that `transport` reaches, and measures it on the samples `test`, if
    there are some, and on `task.validation`.

    With a `seed`, cohorts and what torch draws follow from it, and so does the whole run of a simulation. Without one
    the transport says who takes part, and nothing is drawn here. `count_attempts` is for noise that is drawn anew each
    time: rounds that failed count for ε (`task.failed_rounds`).
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        method: Method,
        transport: Transport,
        test: Batch | None,
        *,
        clients_per_round: int,
        seed: int | None = None,
        count_attempts: bool = False,
    ) -> None:
        self.model, self.task, self.method, self.transport, self.test = model, task, method, transport, test
        self.clients_per_round, self.seed, self.count_attempts = clients_per_round, seed, count_attempts
        self.constant = {} if test is None else best_constant(task, test[1])
        self.on_replies: Callable[[list[Any]], None] | None = None  # an audit hears what rounds are built from
        self._attempts = 0
        with self._drawing(0):
            self.state = ServerState(task, method)

    def run(
        self, folder: RunFolder | None, settings: Mapping[str, Any], *, resume: bool, on_round: OnRound | None = None
    ) -> tuple[nn.Module, list[Record], list[Record]]:
        """Play `settings["rounds"]` rounds, or as far as `settings["stop_at"]` asks: (model, history, timings).

        With a folder, the run is kept there after every round, and `resume` goes on from it. A record is written before
        the checkpoint that counts it: a process killed in between leaves one line too many, which the next `open` cuts
        off, and the round is played again, to the same bytes.
        """
        stop_at = settings.get("stop_at")
        with folder.locked() if folder else nullcontext():
            history, timings, tensors = folder.open(settings, resume) if folder else ([], [], {})
            if tensors:
                self.restore(tensors)
            for number in range(len(history) + 1, int(settings["rounds"]) + 1):
                if stop_at is not None and history and (history[-1]["test_accuracy"] or 0.0) >= stop_at:
                    break
                self._count_attempt(folder, number)
                try:
                    record, timing = self.play(number)
                except (NumericalError, Diverged) as error:
                    error.add_note(f"training diverged: {ADVICE}")
                    raise
                history.append(record)
                timings.append(timing)
                if (worse := failure(history, self.constant)) and not failure(history[:-1], self.constant):
                    record["warning"] = "; ".join([*filter(None, [record.get("warning")]), worse])
                if folder:
                    folder.append("history.jsonl", record)
                    folder.append("timings.jsonl", timing)
                    folder.save_checkpoint(number, self.checkpoint())
                if on_round:
                    on_round(record, timing)
            trained = self.state.trained(self.model)
            if folder:
                with eager(trained) as own:
                    folder.save_model(own.state_dict())
        return trained, history, timings

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
            began, cohort = time.perf_counter(), list(self.transport.available())
            if self.seed is not None:  # else the transport found those that take part
                cohort = draw_cohort(self.seed, cohort, self.clients_per_round, number)
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

    def _drawing(self, number: int) -> AbstractContextManager[None]:
        """What torch draws in a round, in the clients of this process too."""
        return nullcontext() if self.seed is None else seeded_torch(self.task.like.device, self.seed, number)

    def attempt(self, number: int, cohort: Sequence[int]) -> tuple[Outcome, Traffic]:
        """The method's round with these clients: (its outcome, what was sent and lost).

        The method's `round` is a generator, of one exchange or more: each question that it yields goes to the cohort,
        and it is sent the replies, parsed and without those that were rejected. What it returns is the outcome. The
        state stays as it is; where the round succeeds, `transport.end` is still to come, and where it fails it was
        called.
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
            while True:
                messages = self.transport.exchange(question, cohort, traffic)
                try:
                    question = generator.send(self._parsed(question, messages, traffic))
                except StopIteration as end:
                    return _checked(self.method, self.task, end.value), traffic
        except BaseException:
            self.transport.end()
            raise

    def _parsed(self, question: Outgoing, messages: list[Message], traffic: Traffic) -> list[Any]:
        """The replies in these messages, without those that a round cannot be built from."""
        first = question if isinstance(question, Message) else next(iter(question.values()))
        before = traffic.rejected.copy()
        replies = filter_replies(self.method.replies[first.kind], self.task, messages, traffic)
        if not replies:
            diverged = (traffic.rejected - before).keys() == {NOT_FINITE} and not self.transport.anonymous
            why = why_rejected(traffic.rejected, traffic.reasons)
            raise (Diverged if diverged else TooFew)(f"nothing that clients sent could be used: {why}")
        if self.on_replies:
            self.on_replies(replies)
        return replies

    def _record(self, number: int, cohort: Sequence[int], outcome: Outcome, traffic: Traffic) -> Record:
        """What every record says of its round. `failed` (clients by name, with the reason), `rejected` (rows or
        updates by reason), `rejected_why` and `repeated_rows` are there only where there were some.
        """
        scores = self._scores()
        if self.state.tentative and not math.isfinite(scores["test_loss"] or 0.0):
            self.state.tentative = False  # a step that the next cohort will take back
            scores = self._scores()
        if not math.isfinite(scores["test_loss"] or 0.0):
            raise NumericalError(f"the test loss of round {number} is not finite: the training diverged")
        anonymous, rejected = self.transport.anonymous, traffic.rejected
        lost = {
            "rejected": dict(rejected),
            "rejected_why": dict(traffic.reasons),
            "repeated_rows": traffic.repeated,
            "rejected_clients": 0 if anonymous else traffic.rejected_clients,
            "failed": dict(traffic.failed),
            "failed_rounds": self.task.failed_rounds,
        }
        return {
            "round": number,
            **scores,
            "train_loss": outcome.train_loss,
            "steps": outcome.steps,
            "uplink_bytes": traffic.uplink.total(),
            "downlink_bytes": traffic.downlink.total(),
            "clients": list(cohort),
            "uplink": dict(traffic.uplink),
            "downlink": dict(traffic.downlink),
            **{name: value for name, value in lost.items() if value},
            **({"dropped_rows": rejected.total()} if anonymous else {}),
            **outcome.diagnostics,
            **self.transport.notes(cohort),
        }

    def _scores(self) -> Record:
        """The averaged weights' scores, as the record has them; none without test samples. Training does not depend on
        averaging, so `last_accuracy` tells what one without it would have reached.
        """
        if self.test is None:
            return {"test_accuracy": None, "test_loss": None}
        state, averaged = self.state, self.state.averaged
        score = state.score(averaged, self.test)
        last = state.score(state.flat_weights(), self.test) if self.method.average else score
        found = {"test_accuracy": score.accuracy, "test_loss": score.loss, "last_accuracy": last.accuracy}
        if self.task.validation is not None:
            held = state.score(averaged, self.task.validation)
            found |= {"validation_accuracy": held.accuracy, "validation_loss": held.loss}
        return found

    def checkpoint(self) -> State:
        """What the next round starts from: the server's state, and what clients of this process keep."""
        return self.state.checkpoint() | self.transport.checkpoint()

    def restore(self, tensors: State) -> None:
        """Go on from a checkpoint."""
        self.state.restore(tensors)
        self.transport.restore(tensors)


def draw_cohort(seed: int, clients: Sequence[int], size: int, round: int) -> list[int]:
    """`size` of the clients, ascending, or all where fewer are left, drawn for the round: the same for the same seed,
    and no secret.
    """
    rng = np.random.Generator(np.random.PCG64(derive(seed, "cohort", round)))
    return sorted(clients[i] for i in rng.choice(len(clients), min(size, len(clients)), replace=False))


def _checked(method: Method, task: Task, outcome: object) -> Outcome:
    """What `round` returned; `ConfigError` that says what a method must return, if the server cannot go on from it."""
    if not isinstance(outcome, Outcome):
        raise ConfigError(f"{method.name}: `round` must return an Outcome({{…}}, train_loss=…), not {outcome!r:.80}")
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
        lines.append(f"{clients} scaled numbers down to the limit of a secure sum: scale inputs to deviation 1")
    if record.get("taken_back"):
        lines.append("the last step raised this cohort's loss: it is taken back, and repeated shorter")
    texts = (("warning", "warning"), ("solver", "solver_fallback"))
    return lines + [f"{what}: {record[name]}" for what, name in texts if record.get(name)]
