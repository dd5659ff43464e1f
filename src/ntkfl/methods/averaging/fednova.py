"""FedNova. Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, 2020.

Clients that take more local steps τ_m pull an average of models towards their own loss. FedNova averages the updates
per step and takes τ_eff of the averaged steps, so that the objective is Σ_m p_m L_m again however τ_m differ. With
equal τ_m it is FedAvg; `local_epochs` and clients of different sizes make them differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ntkfl.methods.averaging.local_training import FAIR, LocalTraining
from ntkfl.methods.base import Round
from ntkfl.methods.replies import STEPS, Update
from ntkfl.methods.robust import fair_counts
from ntkfl.methods.task import ClientRound, State, Task
from ntkfl.wire.message import Message


class Direction(Update):
    """d_m [d] as `direction`, and τ_m as `steps`."""

    vectors = ("direction",)
    counts = (STEPS,)


class FedNova(LocalTraining):
    """d_m = (w − w_m) / (lr ‖a_m‖₁), then w ← w − lr τ_eff Σ_m p_m d_m with τ_eff = Σ_m p_m τ_m.

    a_m holds the weight that each local gradient has in w − w_m; plain descent has τ_m ones, so ‖a_m‖₁ = τ_m.
    """

    name = "fednova"
    replies = {"weights": Direction}

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """One exchange: d numbers down, d + 1 up. The averaged step is taken τ_eff times."""
        replies = yield self.question(state, round)
        p = self.shares(task, replies)
        d = self.combined(task, replies, p, "direction")
        tau = torch.stack([reply.take(STEPS, ()) for reply in replies]).to(p)
        if task.robust.updates != "mean":
            tau = fair_counts(tau, FAIR)  # reported counts can be false too
        tau_eff = (p * tau).sum()
        new = state["weights"] - self.lr * tau_eff * d
        return self.outcome(replies, p, state | {"weights": new}, effective_steps=float(tau_eff))

    def answer(self, task: Task, question: Message, client: ClientRound) -> Update:
        """d_m [d] and τ_m. Uplink: d + 1 numbers."""
        w, tau = self.begin(task, question), self.steps(client)
        trained = self.train(task, w, client)
        direction = (w - trained.weights) / (self.lr * tau)
        return self.update(client, trained, direction=direction, steps=torch.tensor(tau, dtype=torch.int32))
