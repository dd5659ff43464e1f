"""FedDyn. Acar et al., Federated Learning Based on Dynamic Regularization, 2021.

Every client adds to its loss a linear and a quadratic term that change from round to round, so that where the clients'
losses with these terms are stationary, so is their mean without them: local training may go on as long as it likes.
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


class FedDyn(LocalTraining):
    """w_m ≈ argmin_v L_m(v) − ⟨λ_m, v⟩ + (α/2)‖v − w‖², by local descent from v = w; then λ_m ← λ_m − α (w_m − w),

    h ← h − α (1/N) Σ_m (w_m − w) over the round's clients out of N, and w ← Σ_m p_m w_m − h/α. A client keeps λ_m,
    about its own gradient at w_m, and sends w_m alone. The mean of the w_m is what is reported, as the authors do: the
    next w leads the clients and may be far from all of them.
    """

    paper: ClassVar[str] = "Acar et al. 2021"

    alpha: float = Field(0.1, gt=0, description="α, how strongly clients are held to the weights they agree on")

    def start(self, task: Task, weights: Tensor) -> State:
        return super().start(task, weights) | {"h": torch.zeros_like(weights)}

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        w = state["weights"]
        replies = yield Message("weights", round, {"weights": w})
        p = self.client_weights(replies, w)
        mean = self.combine((self.take(reply, "weights", w) for reply in replies), p, w)
        h = check_finite(
            state["h"] - self.alpha * len(replies) / task.total_clients * (mean - w), "the server's memory h"
        )
        new = check_finite(mean - h / self.alpha, "the averaged model")
        return Outcome({"weights": new, "h": h}, mean_loss(replies, p), reported=mean)

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        w = take_vector(message, "weights", "weights", task.like)
        own = torch.stack([client.memory.get("gradient", torch.zeros_like(w)).to(w) for client in clients])
        result = self.train(task, w, clients, lambda gradients, v: gradients - own + self.alpha * (v - w))
        replies = []
        for client, before, w_m, loss in zip(clients, own, *result, strict=True):
            client.memory["gradient"] = before - self.alpha * (w_m - w)
            replies.append(Message("update", message.round, {"weights": w_m} | report(client, loss)))
        return replies
