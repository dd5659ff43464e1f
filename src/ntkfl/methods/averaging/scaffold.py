"""SCAFFOLD. Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, 2020.

Every client keeps a control variate c_m, about its own gradient, and the server keeps their mean c. Local steps are
corrected by c − c_m, so that they follow all clients' loss rather than the client's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.methods.averaging.local_training import LocalTraining
from ntkfl.methods.base import Round
from ntkfl.methods.replies import Update
from ntkfl.methods.task import ClientRound, State, Task, check_finite
from ntkfl.wire.message import Message


class Controlled(Update):
    """w_m as `weights`, and c_m⁺ − c_m as `control`."""

    vectors = ("weights", "control")
    additive = False  # the server counts the clients that replied


class Scaffold(LocalTraining):
    """v ← v − lr (∇L_m(v) − c_m + c) for K local steps from v = w, ending in w_m; then, with the paper's option II,

    c_m⁺ = c_m − c + (w − w_m) / (K lr),   w ← w + server_lr Σ_m p_m (w_m − w),   c ← c + (|S|/N) Σ_m p_m (c_m⁺ − c_m)
    for the |S| clients of the round out of N. The paper's p_m is uniform, which keeps c the mean of all clients' c_m.
    """

    name = "scaffold"
    replies = {"weights": Controlled}

    server_lr: float = Field(1.0, gt=0, description="the server's step along the averaged update")

    def start(self, task: Task, weights: Tensor) -> State:
        """With c [d], zero."""
        return super().start(task, weights) | {"control": torch.zeros_like(weights)}

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """One exchange: w and c down, w_m and the change of c_m up, 2d numbers each way."""
        w, c = state["weights"], state["control"]
        replies = yield self.question(state, round, control=c)
        p = self.shares(task, replies)
        delta_w = self.combined(task, replies, p, "weights", w) - w
        delta_c = self.combined(task, replies, p, "control")
        new_c = check_finite(c + len(replies) / task.total_clients * delta_c, "the control variate")
        return self.outcome(replies, p, state | {"weights": w + self.server_lr * delta_w, "control": new_c})

    def answer(self, task: Task, question: Message, client: ClientRound) -> Update:
        """w_m and the change of c_m, 2d numbers. The client's memory keeps c_m, zero before its first round."""
        w, c = self.begin(task, question), question.vector("control", task.like)
        c_m = client.memory.get("control", torch.zeros_like(w)).to(w)
        trained = self.train(task, w, client, lambda gradient, v: gradient - c_m + c)
        new_c_m = c_m - c + (w - trained.weights) / (self.steps(client) * self.lr)
        client.memory["control"] = new_c_m
        return self.update(client, trained, weights=trained.weights, control=new_c_m - c_m)
