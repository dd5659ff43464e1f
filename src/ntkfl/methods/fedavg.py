"""Federated averaging. McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

Each client of the round descends its own loss from the broadcast weights; the server averages where they end.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar

from ntkfl.methods.base import ClientRound, Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.local_training import LocalTraining, mean_loss, report, take_vector
from ntkfl.wire import Message


class FedAvg(LocalTraining):
    """w ← Σ_m p_m w_m."""

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al. 2017"
    additive: ClassVar[bool] = True

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        w = state["weights"]
        replies = yield Message("weights", round, {"weights": w})
        p = self.client_weights(replies, w)
        new = self.combine((self.take(reply, "weights", w) for reply in replies), p, w)
        return Outcome({"weights": check_finite(new, "the averaged model")}, mean_loss(replies, p))

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        w = take_vector(message, "weights", "weights", task.like)
        result = self.train(task, w, clients)
        replies = []
        for client, w_m, loss in zip(clients, *result, strict=True):
            replies.append(Message("update", message.round, {"weights": w_m} | report(client, loss)))
        return replies
