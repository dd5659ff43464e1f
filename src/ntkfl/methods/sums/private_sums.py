"""Differentially private training from sums: clipped gradients with discrete Gaussian noise, in whitened inputs.

With g_i the gradient of record i, n records in the cohort, and clip(v) = v / max(‖v‖, C) of norm at most 1:

    (1)  G = Σ_i clip(P g_i) + noise           clients, `noisy_sums.py`; clipped per record, `tangent/clipping.py`
    (2)  v ← m v + P G / (n + noise)           server
    (3)  w ← w − lr v

In the first round clients also send the second moments A of their inputs, each input at one norm, under a share of the
budget. From then on the first layer's inputs are whitened by P = (A/mean + damping)^(−1/2), so that the noise meets
directions of equal size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError, TooFew
from ntkfl.methods.base import Outcome, Round
from ntkfl.methods.replies import SAMPLES, WEIGHTS, Reply
from ntkfl.methods.sums.noisy_sums import LARGEST, VELOCITY, NoisyIntegers, NoisySums, momentum_step
from ntkfl.methods.sums.whitening import (
    check_layer,
    directions,
    is_whitening,
    read_whitening,
    scaled_triangle,
    whitening_arrays,
)
from ntkfl.methods.task import ClientRound, State, Task
from ntkfl.privacy.settings import Privacy
from ntkfl.privacy.sum_noise import COUNT, GRAINS
from ntkfl.tangent.clipping import clipped_gradient, input_moments, whitened
from ntkfl.tangent.curvature import LARGEST as LARGEST_INPUTS
from ntkfl.tangent.sums import GRADIENT, Factor, Layer
from ntkfl.wire.message import Message

ASKS, MOMENTS = "asks", "moments/"
_RANK = 50  # directions that are whitened one by one; all others are alike
_GRADIENT_LIMIT = 0.1  # secure sums: the largest number of one record's gradient, in units of clip


class GradientSums(NoisyIntegers):
    """`gradient` [d], `samples` [1], and `moments/<columns>`, scaled triangles, when asked for."""

    vectors = (GRADIENT,)

    @classmethod
    def numbers(cls, task: Task) -> dict[str, int]:
        return {GRADIENT: task.like.numel(), SAMPLES: 1}

    def check_others(self, task: Task, names: Collection[str]) -> None:
        """Moments of layers that the network may have."""
        for name in names:
            layer = Layer.parse(name.removeprefix(MOMENTS))
            check_layer(layer, Factor(self.take(name, (None,)).unsqueeze(0)).size, task.like)


class PrivateSums(NoisySums):
    """w ← w − lr v,  v ← m v + P (Σ_i clip(P g_i) + noise) / (n + noise)."""

    name: ClassVar[str] = "private-sums"
    paper: ClassVar[str] = "after Abadi et al. 2016 and Kairouz et al. 2021"
    replies: ClassVar[Mapping[str, type[Reply]]] = {"weights": GradientSums}
    contribution: ClassVar[str] = GRADIENT

    label_smoothing: float = Field(0.1, ge=0, lt=1, description="part of a class label spread over all; none with mse")
    clip: float = Field(8.0, gt=0, description="C, bound on the 2-norm of a record's gradient")
    lr: float = Field(6.0, gt=0, description="step along the mean gradient, in units of clip")
    momentum: float = Field(0.8, ge=0, lt=1, description="m, of the server")
    input_share: float = Field(0.1, ge=0, lt=1, description="part of the budget for moments of inputs; 0: no whitening")
    damping: float = Field(0.05, gt=0, description="added to moments of mean eigenvalue 1 before whitening")

    @property
    def first_share(self) -> float:
        return self.input_share

    def once(self, task: Task) -> float:
        """`input_share`, or nothing where no layer can be whitened: then all of the budget goes to the gradients."""
        return self.input_share if task.example is None or whitened_layers(task) else 0.0

    @property
    def step_size(self) -> tuple[str, float, float]:
        return "lr", self.lr, self.momentum

    def asked_once(self, task: Task, question: Message) -> dict[str, int]:
        return whitened_layers(task) if ASKS in question.arrays else {}

    def limit(self, privacy: Privacy, name: str) -> float:
        """Per record at most GRAINS; of the gradient, one of whose numbers is far below its clip, a tenth of that."""
        per_record = {GRADIENT: GRAINS * _GRADIENT_LIMIT, SAMPLES: COUNT}.get(name, GRAINS)
        return min(float(per_record * privacy.sum_samples), LARGEST)

    # -- The server --------------------------------------------------------------------------------------------------

    def start(self, task: Task, weights: Tensor) -> State:
        self.check_round(task, 1)
        if self.input_share and not self.once(task):
            task.notes.append(
                f"inputs are not whitened: no layer that sees them as they are has at most {LARGEST_INPUTS:,} of them; "
                "all of the budget goes to the gradients (input_share = 0)"
            )
        return super().start(task, weights) | {VELOCITY: torch.zeros_like(weights)}

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """(2) and (3). The first round also fixes the whitening, which all later questions carry."""
        self.check_round(task, round, cohort)
        asks = self.once(task) > 0 and round == 1
        known = {name: array for name, array in state.items() if is_whitening(name)}
        asked = {ASKS: torch.tensor(1, dtype=torch.uint8)} if asks else {}
        replies = yield Message("weights", round, {WEIGHTS: state[WEIGHTS]} | known | asked)
        total = self.total(task, replies)
        for name, triangle in total.items() if asks else ():
            if name.startswith(MOMENTS):
                V, rest = directions(triangle, self.damping, _RANK)
                known |= whitening_arrays(name.removeprefix(MOMENTS), V.to(task.like), rest.to(task.like))
        if (count := float(total[SAMPLES]) / COUNT) < 1:
            raise TooFew("the noise is larger than the number of samples: there is nothing to learn from")
        mean = (total[GRADIENT] / (GRAINS * count)).to(task.like)  # in units of clip
        gradient = whitened(mean, read_whitening(known, task.like, self.damping))
        moved = momentum_step(state, gradient, -self.lr, self.momentum)
        return Outcome(moved | known, None, None, self.spent(task, round))

    # -- A client ----------------------------------------------------------------------------------------------------

    def answer(self, task: Task, question: Message, client: ClientRound) -> NoisyIntegers:
        """(1) as integers, with the client's share of noise. A client checks all that its promise rests on: the round,
        the whitening; and it gives moments in the first round alone.
        """
        self.check_round(task, question.of_kind("weights").round)
        asks = ASKS in question.arrays
        if asks and question.round != 1:
            raise MessageError("moments of inputs are given in the first round, once")
        w = question.take(WEIGHTS, tuple(task.like.shape), task.like)
        sent = {name: question.take(name, None, task.like) for name in question.arrays if is_whitening(name)}
        whitening = read_whitening(sent, task.like, self.damping)

        plan = task.plan(_invented(client.x))  # before the weights: what they and the records are may not show in it
        model, Y = task.at(w), task.training_targets(client.y)
        gradient = (
            clipped_gradient(model, client.x, Y, self.loss, plan, self.clip, whitening, task.one_by_one) / self.clip
        )
        moments = input_moments(model, client.x, plan, alone=task.one_by_one) if asks and self.once(task) else {}
        triangles = {MOMENTS + layer.name: scaled_triangle(A) for layer, A in moments.items()}
        return self.integers(task, question, client, {GRADIENT: gradient} | triangles, counts=True)


_LAYERS: WeakKeyDictionary[Task, dict[str, int]] = WeakKeyDictionary()


def whitened_layers(task: Task) -> dict[str, int]:
    """The moments of inputs that a client sends, by name, and how many numbers each has; worked out once for a task."""
    if task not in _LAYERS:
        if task.example is None:
            raise ConfigError("which inputs have moments follows from a sample's shape: give the task an `example`")
        x = task.example[0]
        moments = input_moments(task.model, x, task.plan(_invented(x)))
        _LAYERS[task] = {MOMENTS + layer.name: scaled_triangle(A).numel() for layer, A in moments.items()}
    return _LAYERS[task]


def _invented(x: Tensor) -> Tensor:
    """Two samples of the shape and type of those of x, and nothing else of them."""
    shape = (2, *x.shape[1:])
    if x.is_floating_point():
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(x)
    return torch.arange(2, device=x.device).view(-1, *[1] * (x.ndim - 1)).expand(shape).to(x.dtype)
