"""Federated averaging with differential privacy for every client. McMahan et al., Learning Differentially Private
Recurrent Language Models, 2018.

Each client of the round trains locally and clips the change of its weights as a whole; the noisy sum of the changes
(`noisy_sums.py`), over the number of clients asked, moves the server's weights, with momentum where it is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import ConfigError
from ntkfl.methods.averaging.local_training import train_locally
from ntkfl.methods.base import Outcome, Round
from ntkfl.methods.replies import WEIGHTS, Reply
from ntkfl.methods.sums.noisy_sums import VELOCITY, NoisyIntegers, NoisySums, momentum_step
from ntkfl.methods.task import ClientRound, State, Task
from ntkfl.privacy.settings import Privacy
from ntkfl.privacy.sum_noise import GRAINS, clipped
from ntkfl.wire.message import Message

CHANGE = "change"


class ChangeSums(NoisyIntegers):
    """`change` [d], of the weights by local training, clipped."""

    vectors = (CHANGE,)

    @classmethod
    def numbers(cls, task: Task) -> dict[str, int]:
        return {CHANGE: task.like.numel()}


class DPFedAvg(NoisySums):
    """w ← w + server_lr v,  v ← m v + (Σ_m clip(w_m − w) + noise) / M."""

    name: ClassVar[str] = "dp-fedavg"
    paper: ClassVar[str] = "McMahan et al. 2018"
    replies: ClassVar[Mapping[str, type[Reply]]] = {"weights": ChangeSums}
    _privacy: ClassVar[Privacy] = Privacy(epsilon=3.0)
    unit: ClassVar[str] = "client"
    contribution: ClassVar[str] = CHANGE

    clip: float = Field(0.5, gt=0, description="bound on the 2-norm of a client's change of the weights")
    lr: float = Field(0.1, gt=0, description="local learning rate")
    local_steps: int = Field(20, ge=1, description="gradient steps a client takes in a round")
    batch_size: int = Field(200, ge=1, description="samples in a local step; a smaller client uses all it has")
    server_lr: float = Field(0.4, gt=0, description="step along the mean change")
    momentum: float = Field(0.8, ge=0, lt=1, description="m, of the server")

    @property
    def step_size(self) -> tuple[str, float, float]:
        return "server_lr", self.server_lr * self.clip, self.momentum

    def limit(self, privacy: Privacy, name: str) -> float:
        return float(GRAINS)

    def start(self, task: Task, weights: Tensor) -> State:
        self.check_round(task, 1)
        return super().start(task, weights) | {VELOCITY: torch.zeros_like(weights)}

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """The noisy mean change of the cohort moves the weights, with momentum."""
        self.check_round(task, round, cohort)
        replies = yield Message("weights", round, {WEIGHTS: state[WEIGHTS]})
        mean = self.total(task, replies)[CHANGE] / (GRAINS * len(cohort))  # in units of clip
        moved = momentum_step(state, (self.clip * mean).to(task.like), self.server_lr, self.momentum)
        return Outcome(moved, None, None, self.spent(task, round))

    def answer(self, task: Task, question: Message, client: ClientRound) -> NoisyIntegers:
        """The clipped change of the weights by local training, as integers with noise. Cost: `local_steps` steps."""
        self.check_round(task, question.of_kind("weights").round)
        w = question.take(WEIGHTS, tuple(task.like.shape), task.like)
        trained = train_locally(task, w, client, self.local_steps, self.lr, self.batch_size)
        if trained.statistics is not None:
            raise ConfigError("statistics of batch normalisation would leave without noise: use group normalisation")
        return self.integers(task, question, client, {CHANGE: clipped(trained.weights - w, self.clip)})
