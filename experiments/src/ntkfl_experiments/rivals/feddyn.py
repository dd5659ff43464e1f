"""FedDyn. Acar et al., Federated Learning Based on Dynamic Regularization, 2021.

Every client adds to its loss a linear and a quadratic term that change from round to round, so that where the clients'
losses with these terms are stationary, so is their mean without them: local training may go on as long as it likes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.methods.averaging.local_training import LocalTraining
from ntkfl.methods.base import Round
from ntkfl.methods.replies import Update
from ntkfl.methods.task import ClientRound, State, Task, check_finite
from ntkfl.wire.message import Message


class DynUpdate(Update):
    """w_m as `weights`."""

    additive = False  # the server counts the clients that replied


class FedDyn(LocalTraining):
    """w_m ≈ argmin_v L_m(v) − ⟨λ_m, v⟩ + (α/2)‖v − w‖², by local descent from v = w; then λ_m ← λ_m − α (w_m − w),

    h ← h − α (1/N) Σ_m (w_m − w) over the round's clients out of N, and w ← Σ_m p_m w_m − h/α. A client keeps λ_m,
    about its own gradient at w_m, and sends w_m alone. The mean of the w_m is what is reported, as the authors do: the
    next w leads the clients and may be far from all of them.
    """

    paper: ClassVar[str] = "Acar et al. 2021"
    replies: ClassVar[Mapping[str, type[Update]]] = {"weights": DynUpdate}

    alpha: float = Field(0.1, gt=0, description="α, how strongly clients are held to the weights they agree on")

    def start(self, task: Task, weights: Tensor) -> State:
        return super().start(task, weights) | {"h": torch.zeros_like(weights)}

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        w = state["weights"]
        replies = yield self.question(state, round)
        p = self.shares(task, replies)
        mean = self.combined(task, replies, p, "weights", w)
        h = state["h"] - self.alpha * len(replies) / task.total_clients * (mean - w)
        check_finite(h, "the server's memory h")
        outcome = self.outcome(replies, p, state | {"weights": mean - h / self.alpha, "h": h})
        outcome.reported = mean
        return outcome

    def answer(self, task: Task, question: Message, client: ClientRound) -> Update:
        w = self.begin(task, question)
        own = client.memory.get("gradient", torch.zeros_like(w)).to(w)
        trained = self.train(task, w, client, lambda gradient, v: gradient - own + self.alpha * (v - w))
        client.memory["gradient"] = own - self.alpha * (trained.weights - w)
        return self.update(client, trained, weights=trained.weights)
