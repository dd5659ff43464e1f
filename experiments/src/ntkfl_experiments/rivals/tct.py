"""TCT: train, convexify, train. Yu et al., TCT: Convexifying Federated Learning using Bootstrapped Neural Tangent
Kernels, 2022.

Federated averaging learns features and fails to make use of them where clients' data differ. So, after some rounds of
it, the network is replaced by its linearisation there (`rivals/models.py`), and the linear model is trained on
squared error with SCAFFOLD's correction of local gradients: a convex problem, which differences of clients' data do not
spoil.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import ConfigError, ModelError
from ntkfl.methods.averaging.local_training import LocalTraining
from ntkfl.methods.base import Round
from ntkfl.methods.replies import Update
from ntkfl.methods.task import ClientRound, State, Task, check_finite
from ntkfl.wire.message import Message
from ntkfl_experiments.rivals.models import Convexified

_NETWORK, _THETA, _CONTROL = "network", "theta", "control"


class TCTUpdate(Update):
    """Weights of the network (first rounds), or of the linear model with the change of its control variate, [p, d2]."""

    additive = False
    vectors = ()

    def check(self, task: Task) -> None:
        super().check(task)
        theta, w = _split(task, task.like)
        for name, like in ({_NETWORK: w} if _NETWORK in self.arrays else {_THETA: theta, _CONTROL: theta}).items():
            self.vector(name, like)

    def sizes(self, task: Task) -> Tensor:
        """The largest norm of its arrays, or that of the network's first weights where none is larger: [1, 1]."""
        sent = [self.arrays[name] for name in (_NETWORK, _THETA, _CONTROL) if name in self.arrays]
        norms = [array.double().norm() for array in (_split(task, task.like)[1].cpu(), *sent)]
        return torch.stack(norms).amax().reshape(1, 1)


class TCT(LocalTraining):
    """Rounds 1 to T₁: FedAvg on the network. Then its weights stay, and with a client's features Φ [n, p] and centred
    targets Y [n, d2]

        v ← v − η (Φᵀ(Φ v − Y)/n − c_m + c), K times from v = θ, ending in θ_m;   c_m⁺ = c_m − c + (θ − θ_m)/(K η),
        θ ← Σ_m p_m θ_m,   c ← c + (|S|/N) Σ_m p_m (c_m⁺ − c_m)

    for the |S| clients of the round out of N. c_m⁺ is Φᵀ a for an a [n, d2], which is what a client keeps. The authors
    ask all clients in every round, where c follows from θ and need not travel.
    """

    replies: ClassVar[Mapping[str, type[Update]]] = {"weights": TCTUpdate}

    train_rounds: int = Field(20, ge=1, description="T₁, rounds of federated averaging, before the linear model")
    convex_lr: float = Field(1e-3, gt=0, description="η, local learning rate of the linear model")
    convex_steps: int = Field(100, ge=1, description="K, local steps of the linear model in a round")

    def start(self, task: Task, weights: Tensor) -> State:
        if task.privacy.subsample_rate < 1:
            raise ConfigError(f"clients of {self.name} remember something of each sample: leave subsample_rate at 1")
        return super().start(task, weights) | {_CONTROL: torch.zeros_like(_model(task).theta)}

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        theta, w = _split(task, state["weights"])
        c = state[_CONTROL]
        linear = round > self.train_rounds
        replies = yield Message("weights", round, {_NETWORK: w} | ({_THETA: theta, _CONTROL: c} if linear else {}))
        p = self.shares(task, replies)

        def combined(name: str, like: Tensor, base: Tensor | None = None) -> Tensor:
            return task.robust.combine([reply.vector(name, like) for reply in replies], p, base)

        if linear:
            theta = combined(_THETA, theta, theta)
            c = c + len(replies) / task.total_clients * combined(_CONTROL, theta)
            check_finite(c, "the control variate")
        else:
            w = combined(_NETWORK, w, w)
        return self.outcome(replies, p, state | {"weights": torch.cat([theta.reshape(-1), w]), _CONTROL: c})

    def answer(self, task: Task, question: Message, client: ClientRound) -> Update:
        theta, w = _split(task, task.like)
        w = question.of_kind("weights").vector(_NETWORK, w)
        if _THETA not in question.arrays:
            return self._train(task, w, client)
        theta, c = (question.vector(name, theta) for name in (_THETA, _CONTROL))
        return self._train_linear(task, w, theta, c, client)

    def _train(self, task: Task, w: Tensor, client: ClientRound) -> Update:
        """As in FedAvg, on the network alone."""
        inner = Task(_model(task).network, task.outputs, task.loss, label_smoothing=task.label_smoothing)
        trained = self.train(inner, w, client)
        return TCTUpdate.of(client, trained.loss, **{_NETWORK: trained.weights})

    def _train_linear(self, task: Task, w: Tensor, theta: Tensor, c: Tensor, client: ClientRound) -> Update:
        """The local steps in the span of the client's features: v = θ − kη(c − c_m) + Φᵀα after k of them, so that a
        step costs n² d2 instead of n p d2.
        """
        phi = _model(task, torch.cat([theta.reshape(-1), w])).features(client.x)  # [n, p]
        n, Y = len(phi), task.training_targets(client.y)
        if self.loss == "ce":  # which does not see a shift of all outputs
            Y = Y - 1 / task.outputs
        kept = client.memory.get("residuals", torch.zeros_like(Y)).to(Y)
        if kept.shape != Y.shape:
            raise ConfigError(f"client {client.id} has other samples than it had: what it remembers is not of them")
        gram = phi @ phi.mT
        drift = gram @ kept - phi @ c  # Φ(c_m − c)
        first = phi @ theta - Y
        alpha, met = torch.zeros_like(Y), []
        for k in range(self.convex_steps):
            error = first + k * self.convex_lr * drift + gram @ alpha
            met.append(error.square().mean() / 2)
            alpha = alpha - self.convex_lr / n * error
        residuals = -alpha / (self.convex_steps * self.convex_lr)
        theta_m = theta + self.convex_steps * self.convex_lr * (phi.mT @ kept - c) + phi.mT @ alpha
        check_finite(theta_m, f"the linear model of client {client.id}")
        client.memory["residuals"] = residuals
        arrays = {_THETA: theta_m, _CONTROL: phi.mT @ (residuals - kept)}
        return TCTUpdate.of(client, torch.stack(met).mean(), **arrays)


def _model(task: Task, weights: Tensor | None = None) -> Convexified:
    model = task.model if weights is None else task.at(weights)
    if not isinstance(model, Convexified):
        raise ModelError("tct trains a network and then its linearisation: give it a Convexified (rivals/models.py)")
    return model


def _split(task: Task, flat: Tensor) -> tuple[Tensor, Tensor]:
    """(θ [p, d2], the network's weights [d]) of the flat weights: the order in which the model has its parameters."""
    shape = _model(task).theta.shape
    return flat[: shape.numel()].view(shape), flat[shape.numel() :]
