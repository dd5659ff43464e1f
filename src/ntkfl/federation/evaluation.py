"""Measuring the model after a round, on data that the server has, and what its score is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ntkfl.federation.run_folder import Record
from ntkfl.federation.server_state import Batch, ServerState
from ntkfl.methods import Task
from ntkfl.tangent.losses import LOSSES, per_sample, targets

ADVICE = "take shorter steps (lr, local_steps, time or mu); inputs should be near mean 0 and deviation 1"


def failure(history: Sequence[Record], constant: Mapping[str, Any] | None) -> str:
    """Why a model is worth nothing after these rounds; empty where it is worth something.

    It is worse than the best constant prediction (`constant`: its loss, and its accuracy for classes) in accuracy and
    in loss: ten times as large, or after five rounds 1.05 times. Nothing is said of a model that forgot a client since.
    """
    if not constant or not history or (loss := history[-1]["test_loss"]) is None:
        return ""
    accuracy, limit = history[-1]["test_accuracy"], constant["loss"] * (1.05 if len(history) >= 5 else 10.0)
    if ("accuracy" in constant and accuracy > constant["accuracy"]) or not loss > limit > 0:
        return ""
    told = f"test loss {loss:.4g}, and a constant has {constant['loss']:.4g}"
    return f"the model is worse than a constant prediction: {told}: {ADVICE}"


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

    def constant(self, task: Task) -> Record:
        """Accuracy (of classes) and loss of the best constant prediction: the mean of all targets, of cross-entropy as
        probabilities. Empty for a loss of the user's own.
        """
        y = self.test[1]
        if task.loss not in LOSSES:
            return {}
        Y = targets(y, task.outputs, task.loss, torch.float64)
        mean = Y.mean(0)
        best = mean.clamp_min(1e-300).log() if task.loss == "ce" else mean
        accuracy = {} if y.is_floating_point() else {"accuracy": float(mean.max())}
        return accuracy | {"loss": float(per_sample(task.loss, best.expand_as(Y), Y).mean())}

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
