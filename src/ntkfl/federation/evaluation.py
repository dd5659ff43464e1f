"""Measuring the model after a round, on data that the server has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ntkfl.federation.server_state import Batch, ServerState
from ntkfl.methods import Task
from ntkfl.tangent.losses import LOSSES, per_sample, targets


@dataclass(frozen=True)
class Score:
    """Over all samples counted; no accuracy for real-valued targets, nothing at all where nothing was measured."""

    accuracy: float | None
    loss: float | None
    samples: int


class OwnTestSet:
    """On a test set; with `validation`, on held-out clients' samples too."""

    def __init__(self, test: Batch, validation: Batch | None = None) -> None:
        self.test, self.validation = test, validation

    def constant(self, task: Task) -> Score | None:
        """What the best constant prediction has: the mean of all targets, of cross-entropy as probabilities. None for a
        loss of the user's own.
        """
        y = self.test[1]
        if task.loss not in LOSSES:
            return None
        Y = targets(y, task.outputs, task.loss, torch.float64)
        mean = Y.mean(0)
        best = mean.clamp_min(1e-300).log() if task.loss == "ce" else mean
        accuracy = None if y.is_floating_point() else float(mean.max())
        return Score(accuracy, float(per_sample(task.loss, best.expand_as(Y), Y).mean()), len(y))

    def measure(self, state: ServerState) -> tuple[Score, dict[str, Any]]:
        """(the score of the averaged weights, what else the round's record says of it)."""
        averaged = state.average.value
        # The trajectory does not depend on averaging, so one run tells both curves.
        last = [state.flat_weights()] if state.method.average else []
        scores = state.evaluate(self.test, averaged, *last)
        (accuracy, loss), more = scores[0], dict[str, Any](last_accuracy=scores[-1][0])
        if self.validation is not None:
            ((more["validation_accuracy"], more["validation_loss"]),) = state.evaluate(self.validation, averaged)
        return Score(accuracy, loss, len(self.test[1])), more
