"""TCT: train, convexify, train. Yu et al., TCT: Convexifying Federated Learning using Bootstrapped Neural Tangent
Kernels, 2022.

Federated averaging learns features and fails to make use of them where clients' data differ. So, after some rounds of
it, the network is replaced by its linearisation there (`rivals/models.py`), and the linear model is trained on
squared error with SCAFFOLD's correction of local gradients: a convex problem, which differences of clients' data do not
spoil.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError, ModelError
from ntkfl.methods.base import ClientRound, Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.local_training import LocalTraining, mean_loss, report
from ntkfl.wire import Message
from ntkfl_experiments.rivals.models import Convexified

_NETWORK, _THETA, _CONTROL = "network", "theta", "control"


class TCT(LocalTraining):
    """Rounds 1 to T₁: FedAvg on the network. Then its weights stay, and with a client's features Φ [n, p] and centred
    targets Y [n, d2]

        v ← v − η (Φᵀ(Φ v − Y)/n − c_m + c), K times from v = θ, ending in θ_m;   c_m⁺ = c_m − c + (θ − θ_m)/(K η),
        θ ← Σ_m p_m θ_m,   c ← c + (|S|/N) Σ_m p_m (c_m⁺ − c_m)

    for the |S| clients of the round out of N. c_m⁺ is Φᵀ a for an a [n, d2], which is what a client keeps. The authors
    ask all clients in every round, where c follows from θ and need not travel.
    """

    paper: ClassVar[str] = "Yu et al. 2022"
    vectors: ClassVar[tuple[str, ...]] = ()  # what an audit knows attacks on: of the first rounds, audit fedavg
    sparsifies: ClassVar[bool] = False

    train_rounds: int = Field(20, ge=1, description="T₁, rounds of federated averaging, before the linear model")
    convex_lr: float = Field(1e-3, gt=0, description="η, local learning rate of the linear model")
    convex_steps: int = Field(100, ge=1, description="K, local steps of the linear model in a round")

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.subsample_rate < 1:
            raise ConfigError(f"clients of {self.name} remember something of each sample: leave subsample_rate at 1")

    def start(self, task: Task, weights: Tensor) -> State:
        return super().start(task, weights) | {_CONTROL: torch.zeros_like(_model(task).theta)}

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        theta, w = _split(task, state["weights"])
        c = state[_CONTROL]
        if round <= self.train_rounds:
            replies = yield Message("weights", round, {_NETWORK: w})
            p = self.client_weights(replies, w)
            w = self.combine((_take(reply, _NETWORK, w) for reply in replies), p, w)
        else:
            replies = yield Message("weights", round, {_NETWORK: w, _THETA: theta, _CONTROL: c})
            p = self.client_weights(replies, w)
            theta = self.combine((_take(reply, _THETA, theta) for reply in replies), p, theta)
            change = self.combine((_take(reply, _CONTROL, theta) for reply in replies), p)
            c = check_finite(c + len(replies) / task.total_clients * change, "the control variate")
        new = torch.cat([theta.reshape(-1), w])
        return Outcome({"weights": check_finite(new, "the averaged model"), _CONTROL: c}, mean_loss(replies, p))

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        theta, w = _split(task, task.like)
        w = _take(message, _NETWORK, w, "weights")
        if _THETA not in message.arrays:
            return self._train(task, message.round, w, clients)
        theta, c = (_take(message, name, theta, "weights") for name in (_THETA, _CONTROL))
        return [self._train_linear(task, message.round, w, theta, c, client) for client in clients]

    def _train(self, task: Task, round: int, w: Tensor, clients: Sequence[ClientRound]) -> list[Message]:
        """As in FedAvg, on the network alone."""
        inner = Task(_model(task).network, task.outputs, task.loss, label_smoothing=task.label_smoothing)
        trained = self.train(inner, w, clients)
        return [
            Message("update", round, {_NETWORK: w_m} | report(client, loss))
            for client, w_m, loss in zip(clients, *trained, strict=True)
        ]

    def _train_linear(
        self, task: Task, round: int, w: Tensor, theta: Tensor, c: Tensor, client: ClientRound
    ) -> Message:
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
        return Message("update", round, arrays | report(client, torch.stack(met).mean()))

    def check(self, task: Task, reply: Message) -> Tensor | None:
        """The largest norm of its vectors, or that of the network's first weights where none is larger."""
        self.client_weights([reply.of_kind("update")], task.like)
        theta, w = (part.cpu() for part in _split(task, task.like))
        shapes = {_NETWORK: w} if _NETWORK in reply.arrays else {_THETA: theta, _CONTROL: theta}
        norms = [_take(reply, name, like).double().norm() for name, like in shapes.items()]
        return torch.stack([w.double().norm(), *norms]).amax().reshape(1, 1)

    @property
    def attacks(self) -> frozenset[str]:
        return frozenset()


def _model(task: Task, weights: Tensor | None = None) -> Convexified:
    model = task.model if weights is None else task.at(weights)
    if not isinstance(model, Convexified):
        raise ModelError("tct trains a network and then its linearisation: give it a Convexified (rivals/models.py)")
    return model


def _split(task: Task, flat: Tensor) -> tuple[Tensor, Tensor]:
    """(θ [p, d2], the network's weights [d]) of the flat weights: the order in which the model has its parameters."""
    shape = _model(task).theta.shape
    return flat[: shape.numel()].view(shape), flat[shape.numel() :]


def _take(message: Message, name: str, like: Tensor, kind: str = "update") -> Tensor:
    if name not in message.of_kind(kind).arrays:
        raise MessageError(f"a message without {name!r}")
    return message.take(name, tuple(like.shape), like)
