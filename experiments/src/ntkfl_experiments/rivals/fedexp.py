"""FedExP. Jhunjhunwala et al., FedExP: Speeding Up Federated Averaging via Extrapolation, 2023.

Clients train as in FedAvg. The more their updates Δ_m differ, the shorter is their mean: the server goes further along
it, by a step that it computes anew in every round. Iterates then swing, so the mean of the last two is evaluated.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.methods.base import Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.fedavg import FedAvg
from ntkfl.methods.local_training import UPDATE_LIMIT, mean_loss
from ntkfl.methods.robust import clip_factors
from ntkfl.wire import Message


class FedExP(FedAvg):
    """Δ = Σ_m p_m (w_m − w), w ← w + η_g Δ with η_g = max(1, Σ_m p_m ‖w_m − w‖² / (2 (‖Δ‖² + ε))).

    With the paper's uniform p_m = 1/M the fraction is Σ_m ‖Δ_m‖² / (2M (‖Δ‖² + ε)).
    """

    paper: ClassVar[str] = "Jhunjhunwala et al. 2023"
    additive: ClassVar[bool] = False

    epsilon: float = Field(1e-3, gt=0, description="ε, beside the mean update's square: how far the step may go")

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        w = state["weights"]
        replies = yield Message("weights", round, {"weights": w})
        p = self.client_weights(replies, w)
        updates = [self.take(reply, "weights", w) - w for reply in replies]
        delta = self.combine(updates, p)
        step = max(1.0, self._mean_square(updates, p) / (2 * (_square(delta) + self.epsilon)))
        new = check_finite(w + step * delta, "the extrapolated model")
        # The first of all weights are no iterate of the server's.
        reported = new if round == 1 else (w + new) / 2
        return Outcome({"weights": new}, mean_loss(replies, p), diagnostics={"server_step": step}, reported=reported)

    def _mean_square(self, updates: Sequence[Tensor], p: Tensor) -> float:
        """Σ_m p_m ‖Δ_m‖², of updates no longer than those of which `combine` makes the mean."""
        lengths = torch.tensor([_square(update) for update in updates], dtype=torch.float64).sqrt()
        if self.robust != "mean":
            lengths = lengths * clip_factors(lengths, UPDATE_LIMIT)
        return float((p.cpu().double() * lengths.square()).sum())


def _square(vector: Tensor) -> float:
    return float(vector.double().square().sum())
