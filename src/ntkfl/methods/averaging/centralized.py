"""Training on the pooled data of the round's clients: what no federated method is expected to beat.

Not a federated method: clients hand over their samples. They are counted as the upload they are, every round anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.methods.averaging.local_training import train_locally
from ntkfl.methods.base import Method, Outcome, Round
from ntkfl.methods.replies import Reply, Rows
from ntkfl.methods.task import (
    STATISTICS,
    ClientRound,
    State,
    Task,
    check_finite,
    flat_statistics,
    labels_of,
    load_statistics,
)
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire.message import Message, pack_labels


class Samples(Rows):
    """A client's data: inputs `x` [n, …] and `labels` [n] (real-valued targets: [n, d2])."""

    @classmethod
    def blank(cls, method: Method, task: Task, question: Message) -> Self:
        assert task.example is not None
        x, y = task.example
        return cls({"x": x, "labels": pack_labels(y, task.outputs)})

    def read(self, task: Task) -> tuple[Tensor, Tensor]:
        """(x, y) on the device of the weights."""
        return self.take("x", like=task.like), labels_of(self.take("labels"), task.like)

    def check(self, task: Task) -> None:
        # One client's samples must have the shape of the network's inputs: else they would not stack with the others'.
        x, y = self.read(task)
        assert task.example is not None
        wanted_x, wanted_y = task.example
        fits = x.ndim and y.ndim and 0 < len(x) == len(y)
        if not fits or x.shape[1:] != wanted_x.shape[1:] or y.shape[1:] != wanted_y.shape[1:]:
            raise MessageError(f"inputs {list(x.shape)} and labels {list(y.shape)} do not fit together or the network")


class Centralized(Method):
    """w ← w − lr ∇L(w), `local_steps` times, with L the mean loss over the cohort's samples (or a batch of them)."""

    name: ClassVar[str] = "centralized"
    paper: ClassVar[str] = "none: gradient descent on pooled data"
    replies: ClassVar[Mapping[str, type[Reply]]] = {"weights": Samples}

    lr: float = Field(0.1, gt=0, description="learning rate")
    local_steps: int = Field(20, ge=1, description="gradient steps in a round")
    batch_size: int | None = Field(None, ge=1, description="samples in a step; default: all of the cohort's")

    def start(self, task: Task, weights: Tensor) -> State:
        running = flat_statistics(task.model)  # of batch normalisation, which the server trains with the weights
        return super().start(task, weights) | ({} if running is None else {STATISTICS: running})

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """The server descends the pooled loss itself: clients are asked for their data and no weights travel."""
        replies = yield Message("weights", round, {})
        xs, ys = zip(*(reply.read(task) for reply in replies), strict=True)
        # The server has no seed of its own: the round's number shuffles the batches.
        pool = ClientRound(-1, torch.cat(xs), torch.cat(ys), Randomness.simulated(round))
        if STATISTICS in state:
            load_statistics(task.model, state[STATISTICS])
        trained = train_locally(task, state["weights"], pool, self.local_steps, self.lr, self.batch_size or len(pool))
        new = {"weights": check_finite(trained.weights, "the model trained on pooled data")}
        new |= {} if trained.statistics is None else {STATISTICS: trained.statistics}
        return Outcome(new, float(trained.loss), diagnostics={"samples": len(pool)})

    def answer(self, task: Task, question: Message, client: ClientRound) -> Samples:
        """All of the client's samples of the round, as they are."""
        return Samples({"x": client.x, "labels": pack_labels(client.y, task.outputs)})
