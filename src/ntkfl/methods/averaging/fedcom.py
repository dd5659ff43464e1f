"""FedCOM. Haddadpour et al., Federated Learning with Compression: Unified Analysis and Sharp Guarantees, 2021.

Clients train locally and send their update quantised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import Field

from ntkfl.methods.averaging.qsgd import Compressed, Quantised
from ntkfl.methods.base import Round
from ntkfl.methods.replies import Update
from ntkfl.methods.task import State, Task


class EightBits(Quantised):
    """Unbiased, as the paper's analysis asks: random rounding to 8 bits, scaled by the largest value."""

    bits = 8
    norm = "max"


class FedCOM(Compressed):
    """Δ_m = Q((w − w_m) / lr), Δ = Σ_m p_m Δ_m, w ← w − lr server_lr Δ."""

    name: ClassVar[str] = "fedcom"
    paper: ClassVar[str] = "Haddadpour et al. 2021"
    replies: ClassVar[Mapping[str, type[Update]]] = {"weights": EightBits}

    server_lr: float = Field(1.0, gt=0, description="γ, the server's step along the averaged update")

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """One exchange: d numbers down, d bytes up. The step is the averaged update, γ times."""
        replies = yield self.question(state, round)
        p = self.shares(task, replies)
        delta = self.combined(task, replies, p, "gradient")
        return self.outcome(replies, p, state | {"weights": state["weights"] - self.lr * self.server_lr * delta})
