"""FedNova. Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, 2020.

Clients that take more local steps τ_m pull an average of models towards their own loss. FedNova averages the updates
per step and takes τ_eff of the averaged steps, so that the objective is Σ_m p_m L_m again however τ_m differ. With
equal τ_m it is FedAvg; `most_local_steps` and `local_epochs` are what makes them differ.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.methods.base import ClientRound, Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.local_training import FAIR, LocalTraining, mean_loss, report, take_vector
from ntkfl.methods.robust import fair_counts
from ntkfl.wire import Message


class FedNova(LocalTraining):
    """d_m = (w − w_m) / (lr ‖a_m‖₁), then w ← w − lr τ_eff Σ_m p_m d_m with τ_eff = Σ_m p_m τ_m.

    a_m holds the weight that each local gradient has in w − w_m; plain descent has τ_m ones, so ‖a_m‖₁ = τ_m.
    """

    name: ClassVar[str] = "fednova"
    paper: ClassVar[str] = "Wang et al. 2020"
    vectors: ClassVar[tuple[str, ...]] = ("direction",)
    additive: ClassVar[bool] = True

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        w = state["weights"]
        replies = yield Message("weights", round, {"weights": w})
        p = self.client_weights(replies, w)
        tau = torch.stack([r.take("steps", ()) for r in replies]).to(w)
        if bool((tau < 1).any()):
            raise MessageError("a client reports an update of no local steps")
        d = self.combine((self.take(reply, "direction", w) for reply in replies), p)
        tau_eff = (p * (tau if self.robust == "mean" else fair_counts(tau, FAIR))).sum()  # counts can be false too
        new = check_finite(w - self.lr * tau_eff * d, "the averaged model")
        return Outcome({"weights": new}, mean_loss(replies, p), diagnostics={"effective_steps": float(tau_eff)})

    def check(self, task: Task, reply: Message) -> Tensor | None:
        if int(reply.take("steps", ())) < 1:
            raise MessageError("a client reports an update of no local steps")
        return super().check(task, reply)

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        w = take_vector(message, "weights", "weights", task.like)
        replies = []
        for client, w_m, loss in zip(clients, *self.train(task, w, clients), strict=True):
            tau = self.steps(client)
            steps = {"steps": torch.tensor(tau, dtype=torch.int32)}
            arrays = {"direction": (w - w_m) / (self.lr * tau)} | steps
            replies.append(Message("update", message.round, arrays | report(client, loss)))
        return replies
