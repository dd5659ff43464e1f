"""Training on the pooled data of the round's clients: what no federated method is expected to beat.

Not a federated method: clients hand over their samples. They are counted as the upload they are, every round anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.methods.averaging.local_training import train_locally
from ntkfl.methods.base import Method, Outcome, Round
from ntkfl.methods.replies import Rows
from ntkfl.methods.task import (
    ClientRound,
    State,
    Task,
    blank_sample,
    check_finite,
    labels_of,
    load_statistics,
    statistics_of,
)
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire.message import Message, pack_labels


class Samples(Rows):
    """A client's data: inputs `x` [n, …] and `labels` [n] (real-valued targets: [n, d2])."""

    @classmethod
    def blank(cls, method: Method, task: Task, question: Message) -> Self:
        x, y = blank_sample(task)
        return cls({"x": x, "labels": pack_labels(y, task.outputs)})

    def read(self, task: Task) -> tuple[Tensor, Tensor]:
        """(x, y) on the device of the weights."""
        return self.take("x", like=task.like), labels_of(self.take("labels"), task.like)

    def check(self, task: Task) -> None:
        """Samples of the shape of the network's: others would not stack with theirs."""
        x, y = pair = self.read(task)
        fits = x.ndim and y.ndim and 0 < len(x) == len(y)
        if not fits or any(
            own.shape[1:] != wanted.shape[1:] for own, wanted in zip(pair, blank_sample(task), strict=True)
        ):
            raise MessageError(f"inputs {list(x.shape)} and labels {list(y.shape)} do not fit together or the network")


class Centralized(Method):
    """w ← w − lr ∇L(w), `local_steps` times, with L the mean loss over the cohort's samples (or a batch of them)."""

    name = "centralized"
    replies = {"weights": Samples}

    lr: float = Field(0.1, gt=0, description="learning rate")
    local_steps: int = Field(20, ge=1, description="gradient steps in a round")
    batch_size: int | None = Field(None, ge=1, description="samples in a step; default: all of the cohort's")

    def start(self, task: Task, weights: Tensor) -> State:
        """With the statistics of batch normalisation, which the server trains with the weights."""
        return super().start(task, weights) | statistics_of(task.model)

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """The server descends the pooled loss itself: clients are asked for their data and no weights travel."""
        replies = yield Message("weights", round, {})
        xs, ys = zip(*(reply.read(task) for reply in replies), strict=True)
        # The server has no seed of its own: the round's number shuffles the batches.
        pool = ClientRound(-1, torch.cat(xs), torch.cat(ys), Randomness.simulated(round))
        load_statistics(task.model, state)
        trained = train_locally(task, state["weights"], pool, self.local_steps, self.lr, self.batch_size or len(pool))
        weights = check_finite(trained.weights, "the model trained on pooled data")
        new = {"weights": weights, **trained.statistics}
        return Outcome(new, float(trained.loss), diagnostics={"samples": len(pool)})

    def answer(self, task: Task, question: Message, client: ClientRound) -> Samples:
        """All of the client's samples of the round, as they are."""
        return Samples({"x": client.x, "labels": pack_labels(client.y, task.outputs)})
