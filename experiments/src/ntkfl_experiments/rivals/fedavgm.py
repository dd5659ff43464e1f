"""FedAvgM. Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019.

Federated averaging whose server has momentum: the averaged update is added to what is left of earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.methods.averaging.fedavg import FedAvg
from ntkfl.methods.base import Round
from ntkfl.methods.task import State, Task


class FedAvgM(FedAvg):
    """Δ = Σ_m p_m (w − w_m), v ← β v + Δ, w ← w − server_lr v. The paper's server_lr is 1; β = 0 is then FedAvg."""

    momentum: float = Field(0.9, ge=0, lt=1, description="β, what is left of earlier updates after a round")
    server_lr: float = Field(1.0, gt=0, description="the server's step along the velocity")

    def start(self, task: Task, weights: Tensor) -> State:
        return super().start(task, weights) | {"velocity": torch.zeros_like(weights)}

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        w = state["weights"]
        replies = yield self.question(state, round)
        p = self.shares(task, replies)
        delta = w - self.combined(task, replies, p, "weights", w)
        velocity = self.momentum * state["velocity"] + delta
        return self.outcome(replies, p, state | {"weights": w - self.server_lr * velocity, "velocity": velocity})
