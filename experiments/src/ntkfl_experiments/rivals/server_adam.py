"""Adam at the server, as Kingma and Ba write it (2015): FedAdam with bias correction, which its paper leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ntkfl.methods.averaging.fedadam import BETA2, FedAdam
from ntkfl.methods.base import Round
from ntkfl.methods.task import State, Task


class ServerAdam(FedAdam):
    """As FedAdam with m and v from 0, divided by 1 − β₁ᵗ and 1 − β₂ᵗ in round t: w ← w − server_lr m̂ / (√v̂ + τ)."""

    paper: ClassVar[str] = "Kingma and Ba 2015"

    def start(self, task: Task, weights: Tensor) -> State:
        zero = torch.zeros_like(weights)
        return super().start(task, weights) | {"v": zero, "updates": torch.tensor(0)}

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        outcome = yield from super().round(task, state, round, cohort)
        m, v, t = outcome.state["m"], outcome.state["v"], int(state["updates"]) + 1
        m_hat, v_hat = m / (1 - self.beta1**t), v / (1 - BETA2**t)
        new = state["weights"] - self.server_lr * m_hat / (v_hat.sqrt() + self.tau)
        outcome.state |= {"weights": new, "updates": torch.tensor(t)}
        return outcome
