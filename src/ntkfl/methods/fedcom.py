"""FedCOM. Haddadpour et al., Federated Learning with Compression: Unified Analysis and Sharp Guarantees, 2021.

Clients train locally and send their update quantised.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar

from pydantic import Field

from ntkfl.methods.base import Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.local_training import mean_loss
from ntkfl.methods.qsgd import Compression
from ntkfl.wire import Message


class FedCOM(Compression):
    """Δ_m = Q((w − w_m) / lr), Δ = Σ_m p_m Δ_m, w ← w − lr server_lr Δ.

    Q is unbiased, as the paper's analysis asks: random rounding to 8 bits, scaled by the largest value.
    """

    name: ClassVar[str] = "fedcom"
    paper: ClassVar[str] = "Haddadpour et al. 2021"
    bits: ClassVar[int] = 8
    norm: ClassVar[str] = "max"

    server_lr: float = Field(1.0, gt=0, description="γ, the server's step along the averaged update")

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        w = state["weights"]
        replies = yield Message("weights", round, {"weights": w})
        p = self.client_weights(replies, w)
        delta = self.combine((self.decompress(reply.of_kind("update"), w) for reply in replies), p)
        new = check_finite(w - self.lr * self.server_lr * delta, "the model")
        return Outcome({"weights": new}, mean_loss(replies, p))
