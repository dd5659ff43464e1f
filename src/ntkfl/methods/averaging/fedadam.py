"""FedAdam. Reddi et al., Adaptive Federated Optimization, 2021.

Clients train as in FedAvg; the server takes the averaged update Δ for a gradient and descends it by Adam.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.methods.averaging.fedavg import FedAvg
from ntkfl.methods.base import Round
from ntkfl.methods.task import State, Task, check_finite

_BETA2 = 0.99  # memory of the squared update


class FedAdam(FedAvg):
    """Δ = Σ_m p_m (w − w_m), m ← β₁ m + (1 − β₁) Δ, v ← β₂ v + (1 − β₂) Δ², w ← w − server_lr m / (√v + τ).

    The default is the paper's: no bias correction, m from 0 and v from τ². With `bias_correction` both start from 0 and
    are divided by 1 − βᵗ, which is Adam as usually written with ε = τ.
    """

    name: ClassVar[str] = "fedadam"
    paper: ClassVar[str] = "Reddi et al. 2021"

    server_lr: float = Field(0.01, gt=0, description="the server's learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="β₁, memory of the mean update")
    tau: float = Field(1e-3, gt=0, description="τ, how adaptive: the smaller, the more")
    bias_correction: bool = Field(False, description="divide m and v by 1 − βᵗ; the paper does not")

    def start(self, task: Task, weights: Tensor) -> State:
        v = 0.0 if self.bias_correction else self.tau**2
        moments = {"m": torch.zeros_like(weights), "v": torch.full_like(weights, v)}
        return super().start(task, weights) | moments | {"updates": torch.tensor(0)}

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        w = state["weights"]
        replies = yield self.question(state, round)
        p = self.shares(task, replies)
        delta = w - self.combined(task, replies, p, "weights", w)

        m = self.beta1 * state["m"] + (1 - self.beta1) * delta
        v = _BETA2 * state["v"] + (1 - _BETA2) * delta**2
        check_finite(v, "the mean of squared updates")  # an infinite v would hold every later step at zero
        t = int(state["updates"]) + 1
        m_hat, v_hat = m, v
        if self.bias_correction:
            m_hat, v_hat = m / (1 - self.beta1**t), v / (1 - _BETA2**t)
        new = w - self.server_lr * m_hat / (v_hat.sqrt() + self.tau)
        return self.outcome(replies, p, state | {"weights": new, "m": m, "v": v, "updates": torch.tensor(t)})
