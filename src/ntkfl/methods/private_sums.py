"""Differentially private training from sums: clipped gradients with discrete Gaussian noise, in whitened inputs.

Clients send the sum of their samples' gradients, each clipped to norm `clip` (`tangent/clipping.py`), as integers with
noise (`noisy_sums.py`); at client level, the mean of their gradients, clipped as a whole. In the first round they also
send the second moments A of their inputs, each input at one norm, under a share of the budget; from then on the first
layer's inputs are whitened by P = (A/mean + damping)^(-1/2), so that the noise meets directions of equal size. The
server steps by the noisy mean with momentum, v ← m v + g, w ← w − lr v.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.methods.base import ClientRound, Method, Outcome, Outgoing, State, Task
from ntkfl.methods.noisy_sums import MOMENTS, NoisySums
from ntkfl.methods.whitening import directions, is_whitening, read_whitening, scaled_triangle, whitening_arrays
from ntkfl.privacy.sum_noise import clipped
from ntkfl.tangent.clipping import clipped_gradient, input_moments, whitened
from ntkfl.tangent.curvature import LARGEST
from ntkfl.tangent.sums import Layer
from ntkfl.wire import Message

_ASKS = "asks"
_RANK = 50  # directions that are whitened one by one; all others are alike
_UNCLIPPED = 1e30  # a bound on samples' gradients where only all of a client is clipped


class PrivateSums(NoisySums):
    """w ← w − lr v,  v ← m v + P (Σ_i clip(g_i P) + noise) / (n + noise)."""

    name: ClassVar[str] = "private-sums"
    paper: ClassVar[str] = "after Abadi et al. 2016 and Kairouz et al. 2021"

    input_share: float = Field(0.1, ge=0, lt=1, description="part of the budget for moments of inputs; 0: no whitening")
    damping: float = Field(0.05, gt=0, description="added to moments of mean eigenvalue 1 before whitening")
    clip: float = Field(8.0, gt=0, description="bound on the 2-norm of a record's gradient, or a client's mean")
    lr: float = Field(6.0, gt=0, description="step along the mean gradient, in units of clip")
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="part of a class label spread over all; 0 with mse")

    @model_validator(mode="before")
    @classmethod
    def _resolve_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Those of client level: fewer contributions under far more noise, where moments are not worth their part."""
        level = {"clip": 1.0, "lr": 0.1, "input_share": 0.0} if values.get("unit") == "client" else {}
        smoothing = {"label_smoothing": 0.0} if values.get("loss", "ce") != "ce" else {}
        return level | smoothing | values

    @property
    def once(self) -> float:
        return self.input_share

    @property
    def step(self) -> tuple[str, float]:
        return "lr", self.lr

    def for_network(self, task: Task, x: Tensor) -> tuple[Method, list[str]]:
        """Where no layer is whitened, all of the budget goes to gradients: input_share 0."""
        if not self.input_share or input_moments(task.model, x, task.plan(x)):
            return self, []
        said = (
            f"inputs are not whitened: no layer that sees them as they are has at most {LARGEST:,} inputs; the part "
            f"{self.input_share:g} of the budget for that goes to the gradients (input_share = 0)"
        )
        return self.model_copy(update={"input_share": 0.0}), [said]

    # The server's side.

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        self.check_round(round)
        self.check_cohort(task, cohort)
        asks = bool(self.input_share) and round == 1
        known = {name: array for name, array in state.items() if is_whitening(name)}
        asked = {_ASKS: torch.tensor(1, dtype=torch.uint8)} if asks else {}
        replies = yield Message("weights", round, {"weights": state["weights"]} | known | asked)
        total = self.total(task, round, replies)
        for name, triangle in total.items() if asks else ():
            if name.startswith(MOMENTS):
                V, rest = directions(triangle, self.damping, _RANK)
                known |= whitening_arrays(name.removeprefix(MOMENTS), V.to(task.like), rest.to(task.like))
        gradient = whitened(self.mean(task, total, cohort), read_whitening(known, task.like, self.damping))
        return Outcome(self.moved(state, gradient, -self.lr) | known, None, None, self.spent(round))

    # The clients' side.

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        self.check_round(message.of_kind("weights").round)
        w = message.take("weights", task.like.shape, task.like)
        sent = {name: message.take(name, None, task.like) for name in message.arrays if is_whitening(name)}
        whitening, asks = read_whitening(sent, task.like, self.damping), _ASKS in message.arrays
        if asks and message.round != 1:
            raise MessageError("moments of inputs are given in the first round, once")
        question, replies = message.encode(), []
        for client in clients:
            gradient, moments = self._contribution(task, w, whitening, asks, client)
            replies.append(self.reply(client, message.round, question, gradient, moments))
        return replies

    def _contribution(
        self, task: Task, w: Tensor, whitening: dict[Layer, Tensor], asks: bool, client: ClientRound
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A client's gradient [d] in units of clip, and moments of its inputs by layer where they are asked for."""
        assert self.clip is not None
        plan = task.plan(_invented(client.x))  # before the weights: what they and the records are may not show in it
        model, Y = task.at(w), task.training_targets(client.y)
        each, share = (self.clip, 1.0) if self.unit == "record" else (_UNCLIPPED, 1 / len(client))
        total = clipped_gradient(model, client.x, Y, self.loss, plan, each, whitening)
        gradient = total / self.clip if self.unit == "record" else clipped(share * total, self.clip)
        moments = input_moments(model, client.x, plan) if asks else {}
        return gradient, {layer.name: scaled_triangle(share * A) for layer, A in moments.items()}


def _invented(x: Tensor) -> Tensor:
    """Two samples of the shape and type of those of x, and nothing else of them."""
    shape = (2, *x.shape[1:])
    if x.is_floating_point():
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(x)
    return torch.arange(2, device=x.device).view(-1, *[1] * (x.ndim - 1)).expand(shape).to(x.dtype)
