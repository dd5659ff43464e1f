"""FedProx. Li et al., Federated Optimization in Heterogeneous Networks, 2020.

Federated averaging whose clients are held near the broadcast weights w: client m descends its own loss plus
(μ/2)‖v − w‖².
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from ntkfl.methods.averaging.fedavg import FedAvg
from ntkfl.methods.averaging.local_training import Adjustment, Trained
from ntkfl.methods.task import ClientRound, Task


class FedProx(FedAvg):
    """v ← v − lr (∇L_m(v) + μ (v − w)) in each local step from v = w; then w ← Σ_m p_m v_m."""

    name = "fedprox"

    mu: float = Field(0.01, ge=0, description="μ, the pull towards the broadcast weights; 0 is FedAvg")

    def train(self, task: Task, w: Tensor, client: ClientRound, adjust: Adjustment | None = None) -> Trained:
        """Local descent with the pull μ (v − w) added to every gradient."""
        return super().train(task, w, client, lambda gradient, v: gradient + self.mu * (v - w))
