"""SCAFFOLD. Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, 2020.

Every client keeps a control variate c_m, about its own gradient, and the server keeps their mean c. Local steps are
corrected by c − c_m, so that they follow all clients' loss rather than the client's own.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.methods.base import ClientRound, Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.local_training import LocalTraining, mean_loss, report, take_vector
from ntkfl.wire import Message


class Scaffold(LocalTraining):
    """v ← v − lr (∇L_m(v) − c_m + c) for K local steps from v = w, ending in w_m; then, with the paper's option II,

    c_m⁺ = c_m − c + (w − w_m) / (K lr),   w ← w + server_lr Σ_m p_m (w_m − w),   c ← c + (|S|/N) Σ_m p_m (c_m⁺ − c_m)
    for the |S| clients of the round out of N. The paper's p_m is uniform, which keeps c the mean of all clients' c_m.
    """

    name: ClassVar[str] = "scaffold"
    paper: ClassVar[str] = "Karimireddy et al. 2020"
    vectors: ClassVar[tuple[str, ...]] = ("weights", "control")

    server_lr: float = Field(1.0, gt=0, description="the server's step along the averaged update")

    def start(self, task: Task, weights: Tensor) -> State:
        return super().start(task, weights) | {"control": torch.zeros_like(weights)}

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        w, c = state["weights"], state["control"]
        replies = yield Message("weights", round, {"weights": w, "control": c})
        p = self.client_weights(replies, w)
        delta_w = self.combine((self.take(reply, "weights", w) for reply in replies), p, w) - w
        delta_c = self.combine((self.take(reply, "control", w) for reply in replies), p)
        new = {
            "weights": check_finite(w + self.server_lr * delta_w, "the averaged model"),
            "control": check_finite(c + len(replies) / task.total_clients * delta_c, "the control variate"),
        }
        return Outcome(new, mean_loss(replies, p))

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        w = take_vector(message, "weights", "weights", task.like)
        c = take_vector(message, "weights", "control", task.like)
        own = torch.stack([client.memory.get("control", torch.zeros_like(w)).to(w) for client in clients])
        result = self.train(task, w, clients, lambda gradients, v: gradients - own + c)
        replies, controls = [], []
        for client, c_m, w_m, loss in zip(clients, own, *result, strict=True):
            controls.append(c_m - c + (w - w_m) / (self.steps(client) * self.lr))
            arrays = {"weights": w_m, "control": controls[-1] - c_m}
            replies.append(Message("update", message.round, arrays | report(client, loss)))
        for client, control in zip(clients, controls, strict=True):
            client.memory["control"] = control
        return replies
