"""FedAdam. Reddi et al., Adaptive Federated Optimization, 2021.

Clients train as in FedAvg; the server takes the averaged update Δ for a gradient and descends it by Adam.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.methods.averaging.fedavg import FedAvg
from ntkfl.methods.base import Round
from ntkfl.methods.task import State, Task, check_finite

BETA1 = 0.9  # memory of the mean update
BETA2 = 0.99  # memory of the squared update
TAU = 1e-3  # τ, how adaptive: the smaller, the more


class FedAdam(FedAvg):
    """Δ = Σ_m p_m (w − w_m), m ← β₁ m + (1 − β₁) Δ, v ← β₂ v + (1 − β₂) Δ², w ← w − server_lr m / (√v + τ).

    As in the paper, m starts from 0 and v from τ², and neither is divided by 1 − βᵗ as in Adam: the first
    steps are small.
    """

    name = "fedadam"

    server_lr: float = Field(0.01, gt=0, description="the server's learning rate")

    def start(self, task: Task, weights: Tensor) -> State:
        """With the moments m and v [d]."""
        return super().start(task, weights) | {
            "m": torch.zeros_like(weights),
            "v": torch.full_like(weights, TAU**2),
        }

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """One exchange, as FedAvg's; the server keeps 2d numbers beside the weights."""
        w = state["weights"]
        # Clients do as in FedAvg; what differs is what the server makes of the mean change.
        replies = yield self.question(state, round)
        p = self.shares(task, replies)
        delta = w - self.combined(task, replies, p, "weights", w)

        m = BETA1 * state["m"] + (1 - BETA1) * delta
        v = BETA2 * state["v"] + (1 - BETA2) * delta**2
        check_finite(v, "the mean of squared updates")  # an infinite v would hold every later step at zero
        new = w - self.server_lr * m / (v.sqrt() + TAU)
        return self.outcome(replies, p, state | {"weights": new, "m": m, "v": v})
