"""The network that is trained and its loss (`Task`), a client in one round (`ClientRound`), and running statistics.

Batch normalisation's running statistics are what local training changes beside weights, and what updates carry. Methods
whose clients train locally broadcast and average them. NTK-FL evolves weights alone: there they stay.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ntkfl.errors import ConfigError, NumericalError
from ntkfl.methods.robust import Robust
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.settings import Privacy
from ntkfl.tangent import Jacobian, jacobian, plan_jacobian
from ntkfl.tangent.losses import AnyLoss, find_loss, per_sample, targets
from ntkfl.tangent.parameters import eager, evaluating, flatten, load_flat, unflatten, with_values
from ntkfl.tangent.passes import JacobianPlan

STATISTICS = "statistics"  # of batch normalisation: their name in messages and states
_ROWS = 4096  # samples that pass through the network at once
State = dict[str, Tensor]  # what the server keeps between rounds; "weights" [d] is the model to broadcast next


@dataclass(slots=True)
class ClientRound:
    """A client as it is in one round: its data, its randomness for the round, and what it keeps between rounds."""

    id: int
    x: Tensor
    y: Tensor
    randomness: Randomness
    memory: State = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.y)


class Task:
    """The network, its loss, and what surrounds the method: privacy, robustness, data that the server itself may hold.
    The model given is never changed.

    `notes` are lines that a method adds when it starts, about options that the network decided.
    """

    def __init__(
        self,
        model: nn.Module,
        outputs: int,
        loss: AnyLoss,
        *,
        label_smoothing: float = 0.0,
        privacy: Privacy | None = None,
        robust: Robust | None = None,
        total_clients: int = 1,
    ) -> None:
        with eager(model) as own:
            self.model = copy.deepcopy(own)
        find_loss(loss)  # fails before the first round where a loss named by its user does not exist
        self.outputs, self.loss, self.label_smoothing = outputs, loss, label_smoothing
        self.privacy, self.robust = privacy or Privacy(), robust or Robust()
        self.total_clients = total_clients  # of the whole federation, not of a round
        self.failed_rounds = 0  # that drew noise anew and then failed: they count for ε
        # Samples (x, y) that the server itself holds: those that data sharing gives away, those of held-out clients.
        self.shared: tuple[Tensor, Tensor] | None = None
        self.validation: tuple[Tensor, Tensor] | None = None
        self.example: tuple[Tensor, Tensor] | None = None  # a sample of zeros: x [1, …] as the network gets it, y
        self.notes: list[str] = []
        # Whether samples go through the network one at a time, so that none changes how another one is rounded: where
        # noise is real, and the weights may be chosen by somebody who looks for that.
        self.one_by_one = False
        self.like = flatten(self.model)  # device and type of weights [d]
        self._plans: dict[Hashable, JacobianPlan] = {}

    def at(self, weights: Tensor) -> nn.Module:
        """The network with these weights loaded: one scratch copy, overwritten by the next call."""
        load_flat(self.model, weights)
        return self.model

    @torch.no_grad()
    def predict(self, weights: Tensor, x: Tensor) -> Tensor:
        """f(w; x) in eval mode, [N, d2]."""
        with evaluating(self.model):
            outputs = with_values(self.model, unflatten(self.model, weights))
            return torch.cat([outputs(part) for part in torch.split(x, _ROWS)])

    @torch.no_grad()
    def candidate_losses(self, candidates: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """ℓ of every sample under each of the candidate weights [S, d]: [S, N]. S forward passes."""
        return self.losses(torch.stack([self.predict(w, x) for w in candidates]), y)

    def jacobian(self, weights: Tensor, x: Tensor, form: str = "auto") -> Jacobian:
        """J at these weights for the rows of x."""
        return jacobian(self.at(weights), x, form, plan=self.plan(x, form))

    def plan(self, x: Tensor, form: str = "auto") -> JacobianPlan:
        """How Jacobians of this network are made, worked out once for inputs of one shape and type."""
        kind = (form, x.shape[1:], x.dtype)
        if kind not in self._plans:
            self._plans[kind] = plan_jacobian(self.model, x, form)
        return self._plans[kind]

    def training_targets(self, y: Tensor) -> Tensor:
        """Targets [N, d2] to train on. With cross-entropy a class keeps 1 − s of its one, all share the rest."""
        Y = targets(y, self.outputs, self.loss, self.like.dtype)
        s = self.label_smoothing if self.loss == "ce" and not y.is_floating_point() else 0.0
        return Y if s == 0 else Y.mul_(1 - s).add_(s / self.outputs)

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """ℓ of outputs [..., N, d2] on the true labels, [..., N]."""
        return per_sample(self.loss, outputs, targets(y, self.outputs, self.loss, outputs.dtype))


def blank_sample(task: Task) -> tuple[Tensor, Tensor]:
    """The task's `example`, from whose shape the form of replies follows."""
    if task.example is None:
        raise ConfigError("the form of replies follows from a sample's shape: give the task an `example`")
    return task.example


def check_finite(weights: Tensor, what: str) -> Tensor:
    """`weights` themselves, unless the round has blown up."""
    if not bool(weights.isfinite().all()):
        raise NumericalError(f"{what} has values that are not finite: the training diverged")
    return weights


def labels_of(labels: Tensor, like: Tensor) -> Tensor:
    """Labels from a message: classes as int64, real-valued targets in the weights' type; on the weights' device."""
    return labels.to(device=like.device, dtype=like.dtype if labels.is_floating_point() else torch.int64)


# -- Batch normalisation -----------------------------------------------------------------------------------------------


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Running means and variances of the model's batch normalisations by name, but for those of a frozen backbone."""
    owners = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, _BatchNorm) and m.track_running_stats and not getattr(m, "statistics_stay", False)
    }
    kinds = ("running_mean", "running_var")
    return {f"{name}.{kind}" if name else kind: getattr(m, kind) for name, m in owners.items() for kind in kinds}


def statistics_of(model: nn.Module) -> State:
    """All of them as one vector [b], by its name in messages and states; nothing for a network without any."""
    values = [v.detach().reshape(-1) for v in statistics(model).values()]
    return {STATISTICS: torch.cat(values)} if values else {}


def load_statistics(model: nn.Module, arrays: Mapping[str, Tensor]) -> None:
    """Write the vector [b] of statistics, if the arrays hold it, into the model's own, in place."""
    if STATISTICS in arrays:
        own = statistics(model).values()
        for value, part in zip(own, torch.split(arrays[STATISTICS], [v.numel() for v in own]), strict=True):
            value.copy_(part.view_as(value))
