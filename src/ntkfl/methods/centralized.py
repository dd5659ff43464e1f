"""Training on the pooled data of the round's clients: what no federated method is expected to beat.

Not a federated method: clients hand over their samples. They are counted as the upload they are, every round anew.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar

import torch
from pydantic import Field

from ntkfl.errors import MessageError
from ntkfl.methods.base import ClientRound, Method, Outcome, Outgoing, State, Task, check_finite, take_labels
from ntkfl.methods.local_sgd import train_locally
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message, join_rows, pack_labels, split_rows


class Centralized(Method):
    """w ← w − lr ∇L(w), `local_steps` times, with L the mean loss over the cohort's samples (or a batch of them)."""

    name: ClassVar[str] = "centralized"
    paper: ClassVar[str] = "none: gradient descent on pooled data"
    shows: ClassVar[str] = "samples"
    sampled: ClassVar[tuple[str, ...]] = ("data",)
    trains_locally: ClassVar[bool] = True  # the server does, and with it the model's running statistics

    lr: float = Field(0.1, gt=0, description="learning rate")
    local_steps: int = Field(20, ge=1, description="gradient steps in a round")
    batch_size: int | None = Field(None, ge=1, description="samples in a step; default: all of the cohort's")

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        w = state["weights"]
        replies = yield Message("data", round, {})
        xs = [reply.of_kind("data").take("x", like=w) for reply in replies]
        ys = [take_labels(reply, "labels", w) for reply in replies]
        for x, y in zip(xs, ys, strict=True):
            alike = x.shape[1:] == xs[0].shape[1:] and y.shape[1:] == ys[0].shape[1:]
            if not (x.ndim and len(x) and x.shape[:1] == y.shape[:1] and alike):
                raise MessageError("the clients' samples and labels do not fit together")
        # The server has no seed of its own: the round's number shuffles the batches.
        pool = ClientRound(-1, torch.cat(xs), torch.cat(ys), Randomness.simulated(round))
        result = train_locally(task, w, [pool], self.local_steps, self.lr, self.batch_size or len(pool))
        new = check_finite(result.weights[0], "the model trained on pooled data")
        after = {"weights": new} | ({} if pool.statistics is None else {"statistics": pool.statistics})
        return Outcome(after, float(result.losses[0]), diagnostics={"samples": len(pool)})

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        message.of_kind("data")
        return [
            Message("data", message.round, {"x": client.x, "labels": pack_labels(client.y, task.outputs)})
            for client in clients
        ]

    def split(self, reply: Message) -> list[Message]:
        return split_rows(reply)

    def join(self, rows: list[Message]) -> list[Message]:
        return [join_rows(rows)]
