"""FedExP. Jhunjhunwala et al., FedExP: Speeding Up Federated Averaging via Extrapolation, 2023.

Clients train as in FedAvg. The more their updates Δ_m differ, the shorter is their mean: the server goes further along
it, by a step that it computes anew in every round. Iterates then swing, so the mean of the last two is evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field

from ntkfl.methods.averaging.fedavg import FedAvg
from ntkfl.methods.base import Round
from ntkfl.methods.replies import Update
from ntkfl.methods.robust import UPDATE_LIMIT, clip_factors
from ntkfl.methods.task import State, Task


class ExpUpdate(Update):
    """w_m as `weights`."""

    additive = False  # the server needs each client's length


class FedExP(FedAvg):
    """Δ = Σ_m p_m (w_m − w), w ← w + η_g Δ with η_g = max(1, Σ_m p_m ‖w_m − w‖² / (2 (‖Δ‖² + ε))).

    With the paper's uniform p_m = 1/M the fraction is Σ_m ‖Δ_m‖² / (2M (‖Δ‖² + ε)).
    """

    paper: ClassVar[str] = "Jhunjhunwala et al. 2023"
    replies: ClassVar[Mapping[str, type[Update]]] = {"weights": ExpUpdate}

    epsilon: float = Field(1e-3, gt=0, description="ε, beside the mean update's square: how far the step may go")

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        w = state["weights"]
        replies = yield self.question(state, round)
        p = self.shares(task, replies)
        delta = self.combined(task, replies, p, "weights", w) - w
        lengths = torch.stack([(reply.vector("weights", w) - w).double().norm() for reply in replies])
        if task.robust.updates != "mean":  # no longer than those of which `combined` makes the mean
            lengths = lengths * clip_factors(lengths, UPDATE_LIMIT)
        mean_square = float(p.double() @ lengths.square())
        step = max(1.0, mean_square / (2 * (float(delta.double().square().sum()) + self.epsilon)))
        new = w + step * delta
        outcome = self.outcome(replies, p, state | {"weights": new}, server_step=step)
        outcome.reported = (
            new if round == 1 else (w + new) / 2
        )  # the first weights of all are no iterate of the server's
        return outcome
