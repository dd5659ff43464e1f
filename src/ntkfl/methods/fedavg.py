"""Federated averaging. McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

Each client of the round descends its own loss from the broadcast weights; the server averages where they end.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import ConfigError
from ntkfl.methods.base import Client, Method, Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.local import LocalResult, train_locally
from ntkfl.wire import Message

WEIGHTINGS = ("samples", "uniform")


class LocalTraining(Method):
    """Options of every method whose clients train locally, and the two ends of the conversation they share."""

    lr: float = Field(0.1, gt=0, description="local learning rate")
    local_steps: int = Field(20, ge=1, description="gradient steps a client takes in a round")
    batch_size: int = Field(200, ge=1, description="samples in a local step; a smaller client uses all it has")
    weighting: str = Field("uniform", description="clients count equally (the paper's objective) or by their samples")

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.weighting not in WEIGHTINGS:
            raise ConfigError(f"unknown weighting {self.weighting!r}: valid are {', '.join(WEIGHTINGS)}")

    def train(self, task: Task, weights: Tensor, clients: Sequence[Client]) -> LocalResult:
        return train_locally(task, weights, clients, self.local_steps, self.lr, self.batch_size)

    def client_weights(self, replies: Sequence[Message], like: Tensor) -> Tensor:
        """p_m, summing to one: uniform, or in proportion to the samples that clients report. [M]"""
        samples = torch.stack([r.take("samples", ()) for r in replies]).to(like)
        p = samples if self.weighting == "samples" else torch.ones_like(samples)
        return p / p.sum()


class FedAvg(LocalTraining):
    """w ← Σ_m p_m w_m."""

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al. 2017"

    def round(self, task: Task, state: State, round: int) -> Generator[Outgoing, list[Message], Outcome]:
        w = state["weights"]
        replies = yield Message("weights", round, {"weights": w})
        p = self.client_weights(replies, w)
        # A running sum, so that no two clients' weights need be held at once.
        new = torch.zeros_like(w)
        for share, reply in zip(p, replies, strict=True):
            new += share * reply.of_kind("update").take("weights", tuple(w.shape), w)
        return Outcome({"weights": check_finite(new, "the averaged model")}, mean_loss(replies, p))

    def answer(self, task: Task, message: Message, clients: Sequence[Client]) -> list[Message]:
        w = message.of_kind("weights").take("weights", tuple(task.like.shape), task.like)
        result = self.train(task, w, clients)
        return [
            Message("update", message.round, {"weights": w_m} | report(client, loss))
            for client, w_m, loss in zip(clients, *result, strict=True)
        ]


def report(client: Client, loss: Tensor) -> dict[str, Tensor]:
    """What every local update carries beside itself: sample count and the mean loss met on the way."""
    return {"samples": torch.tensor(len(client), dtype=torch.int32), "loss": loss.to(torch.float32)}


def mean_loss(replies: Sequence[Message], p: Tensor) -> float:
    """The cohort's local training loss, weighted as the clients are."""
    return float((torch.stack([r.take("loss", ()) for r in replies]).to(p) * p).sum())
