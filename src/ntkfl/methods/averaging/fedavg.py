"""Federated averaging. McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

Each client of the round descends its own loss from the broadcast weights; the server averages where they end.
"""

from __future__ import annotations

from collections.abc import Sequence

from ntkfl.methods.averaging.local_training import LocalTraining
from ntkfl.methods.base import Round
from ntkfl.methods.replies import Update
from ntkfl.methods.task import ClientRound, State, Task
from ntkfl.wire.message import Message


class FedAvg(LocalTraining):
    """w ← Σ_m p_m w_m."""

    name = "fedavg"

    # Box 1 of the paper, with p_m = 1/M (weighting "uniform") or n_m/Σn ("samples").

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """One exchange: w goes down, w_m and n_m come back. d numbers each way."""
        replies = yield self.question(state, round)
        p = self.shares(task, replies)
        new = self.combined(task, replies, p, "weights", state["weights"])
        return self.outcome(replies, p, state | {"weights": new})

    def answer(self, task: Task, question: Message, client: ClientRound) -> Update:
        """w_m [d], where the client's own steps from w end. Uplink: d numbers."""
        w = self.begin(task, question)
        trained = self.train(task, w, client)
        return self.update(client, trained, weights=trained.weights)
