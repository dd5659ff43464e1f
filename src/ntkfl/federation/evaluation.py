"""Measuring a model where the data and ρ are. Evaluators return counts over data of their own; without any, the round's
clients return one anonymous row a sample of the round, so that nobody's size shows and nobody's vote weighs more.

An evaluator answers one question per round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ntkfl.errors import MessageError, TooFew
from ntkfl.federation.server_state import Batch, ServerState
from ntkfl.federation.transport import Transport
from ntkfl.methods import Task
from ntkfl.methods.additive import LARGEST_LOSS, Addend, Summand
from ntkfl.methods.batchnorm import NAME
from ntkfl.tangent.losses import LOSSES, per_sample, targets
from ntkfl.wire import Message, split_rows

MOST_SAMPLES = 1 << 31  # of one report
SUMMED_SAMPLES = 1 << 17  # of an evaluator in a secure sum: one with more counts as one with as many
MOST_LOSS = 1e6  # of one sample: larger is said as this


@dataclass(frozen=True)
class Score:
    """Over all samples counted; no accuracy for real-valued targets, nothing at all where nobody could be asked."""

    accuracy: float | None
    loss: float | None
    samples: int


class Evaluator(Protocol):
    """Measures the averaged model after a round."""

    def constant(self, task: Task) -> Score | None:
        """What the best constant prediction has on the same data, where that is known."""

    def measure(self, state: ServerState, round: int, cohort: Sequence[int]) -> tuple[Score, dict[str, Any]]:
        """(the score, what else the round's record says of it)."""


class OwnTestSet:
    """On data that the server has; with `validation`, on those of held-out clients too."""

    def __init__(self, test: Batch, validation: Batch | None = None) -> None:
        self.test, self.validation = test, validation

    def constant(self, task: Task) -> Score | None:
        """The mean of all targets; of cross-entropy, as probabilities. Unknown for a loss of the user's own."""
        y = self.test[1]
        if task.loss not in LOSSES:
            return None
        Y = targets(y, task.outputs, task.loss, torch.float64)
        mean = Y.mean(0)
        best = mean.clamp_min(1e-300).log() if task.loss == "ce" else mean
        accuracy = None if y.is_floating_point() else float(mean.max())
        return Score(accuracy, float(per_sample(task.loss, best.expand_as(Y), Y).mean()), len(y))

    def measure(self, state: ServerState, round: int, cohort: Sequence[int]) -> tuple[Score, dict[str, Any]]:
        averaged = state.average.value
        # The trajectory does not depend on averaging, so one run tells both curves.
        last = [state.flat_weights()] if state.method.average else []
        scores = state.evaluate(self.test, averaged, *last)
        (accuracy, loss), more = scores[0], dict[str, Any](last_accuracy=scores[-1][0])
        if self.validation is not None:
            ((more["validation_accuracy"], more["validation_loss"]),) = state.evaluate(self.validation, averaged)
        return Score(accuracy, loss, len(self.test[1])), more


class AskedClients:
    """By those that the transport asks, each report of at most `most` samples. A round that nobody measures is still a
    round.
    """

    def __init__(
        self, transport: Transport, real_targets: bool, say: Callable[[str], None], most: int = MOST_SAMPLES
    ) -> None:
        self.transport, self.real_targets, self.say, self.most = transport, real_targets, say, most

    def constant(self, task: Task) -> Score | None:
        return None

    def measure(self, state: ServerState, round: int, cohort: Sequence[int]) -> tuple[Score, dict[str, Any]]:
        weights, own = state.parts(state.average.value)
        reports = []
        try:
            for report in self.transport.evaluate(question(round, weights, own), cohort):
                try:
                    add_up([report], self.real_targets, self.most)
                    reports.append(report)
                except MessageError as error:
                    self.say(f"round {round}: counts were dropped: {error}")
        except TooFew as error:
            self.say(f"round {round} was not evaluated: {error}")
        return add_up(reports, self.real_targets, self.most), {}


def question(round: int, weights: Tensor, statistics: Tensor | None = None) -> Message:
    """How well do these weights do, with these statistics of batch normalisation?"""
    own = {} if statistics is None or not len(statistics) else {NAME: statistics}
    return Message("evaluate", round, {"weights": weights} | own)


def score_rows(task: Task, message: Message, x: Tensor, y: Tensor) -> list[Message]:
    """One answer a sample: whether the model gets it right (−1 for real-valued targets), and its loss."""
    weights = message.of_kind("evaluate").take("weights", tuple(task.like.shape), task.like)
    outputs = task.predict(weights, x)
    correct = torch.full((len(y),), -1) if y.is_floating_point() else (outputs.argmax(1) == y).long()
    loss = task.losses(outputs, y).double().nan_to_num(nan=MOST_LOSS, posinf=MOST_LOSS).clamp(max=MOST_LOSS)
    arrays = {"correct": correct, "samples": torch.ones(len(y), dtype=torch.int64), "loss": loss}
    return split_rows(Message("counts", message.round, arrays))


def counts(task: Task, message: Message, x: Tensor, y: Tensor) -> Message:
    """One answer for all samples: how many, how many right (−1 for real-valued targets), the sum of their losses."""
    rows = score_rows(task, message, x, y)
    total = {name: torch.stack([row.arrays[name] for row in rows]).sum(0) for name in rows[0].arrays}
    if y.is_floating_point():
        total["correct"] = torch.tensor([-1])
    return Message("counts", message.round, total)


def counts_summand(answer: Message, most_samples: int) -> Summand:
    """What one answer adds to a secure sum, as if of `most_samples` samples where it counts more."""
    samples, correct, loss = (answer.arrays[name].double().cpu() for name in ("samples", "correct", "loss"))
    share = min(1.0, most_samples / float(samples))
    values = {
        "correct": correct.clamp(min=0),
        "samples": samples,
        "loss": loss.clamp(max=float(samples) * LARGEST_LOSS),
    }
    limits = {"correct": 1.0, "samples": 1.0, "loss": LARGEST_LOSS}
    return {name: Addend(share * value, most_samples * limits[name]) for name, value in values.items()}


def total_counts(round: int, total: Mapping[str, Tensor], real_targets: bool) -> Message:
    """The answer that stands for the sum of many."""
    samples, correct = int(total["samples"].round()), int(total["correct"].round())
    return _counts(round, -1 if real_targets else min(correct, samples), samples, float(total["loss"]))


def rounded(answer: Message, multiple: int) -> Message:
    """All three numbers to the nearest multiple; at least one multiple of samples."""
    right, samples = int(answer.arrays["correct"]), int(answer.arrays["samples"])
    near = [multiple * ((2 * n + multiple) // (2 * multiple)) for n in (right, samples)]
    loss = float(multiple * round(float(answer.arrays["loss"]) / multiple))
    return _counts(answer.round, -1 if right == -1 else near[0], max(multiple, near[1]), loss)


def _counts(round: int, correct: int, samples: int, loss: float) -> Message:
    arrays = {"correct": torch.tensor([correct]), "samples": torch.tensor([samples])}
    return Message("counts", round, arrays | {"loss": torch.tensor([loss], dtype=torch.float64)})


def add_up(answers: Sequence[Message], real_targets: bool, most: int = MOST_SAMPLES) -> Score:
    """All answers together, each of at most `most` samples; `MessageError` where one makes no sense."""
    correct, samples, loss = 0, 0, 0.0
    for answer in answers:
        n = int(answer.of_kind("counts").take("samples", (1,)))
        right, lost = int(answer.take("correct", (1,))), float(answer.take("loss", (1,)))
        fits = right == -1 if real_targets else 0 <= right <= n
        if not (1 <= n <= most and fits and 0 <= lost <= n * MOST_LOSS):
            raise MessageError("counts that make no sense")
        correct, samples, loss = correct + right, samples + n, loss + lost
    if not samples:
        return Score(None, None, 0)
    return Score(None if real_targets else correct / samples, loss / samples, samples)
