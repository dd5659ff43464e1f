"""Federated averaging with differential privacy for every client. McMahan et al., Learning Differentially Private
Recurrent Language Models, 2018.

Each client of the round trains locally, and the change of its weights is clipped as a whole; noisy sums of the changes
(`noisy_sums.py`), over the number of clients asked, move the server's weights, with momentum where it is wanted.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar

from pydantic import Field

from ntkfl.errors import ConfigError
from ntkfl.methods.base import ClientRound, Outcome, Outgoing, State, Task
from ntkfl.methods.local_sgd import train_locally
from ntkfl.methods.noisy_sums import NoisySums
from ntkfl.privacy.sum_noise import clipped
from ntkfl.wire import Message


class DPFedAvg(NoisySums):
    """w ← w + server_lr v,  v ← m v + (Σ_m clip(w_m − w) + noise) / M."""

    name: ClassVar[str] = "dp-fedavg"
    paper: ClassVar[str] = "McMahan et al. 2018"
    trains_locally: ClassVar[bool] = True
    units: ClassVar[tuple[str, ...]] = ("client",)
    vector: ClassVar[str] = "change"

    unit: str = Field("client", description="what ε protects: a client with all its data")
    clip: float = Field(0.5, gt=0, description="bound on the 2-norm of a client's change of the weights")
    lr: float = Field(0.1, gt=0, description="local learning rate")
    local_steps: int = Field(20, ge=1, description="gradient steps a client takes in a round")
    batch_size: int = Field(200, ge=1, description="samples in a local step; a smaller client uses all it has")
    server_lr: float = Field(0.4, gt=0, description="step along the mean change")

    @property
    def step(self) -> tuple[str, float]:
        return "server_lr", self.server_lr * self.clip

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        self.check_round(round)
        self.check_cohort(task, cohort)
        replies = yield Message("weights", round, {"weights": state["weights"]})
        change = self.clip * self.mean(task, self.total(task, round, replies), cohort)
        return Outcome(self.moved(state, change, self.server_lr), None, None, self.spent(round))

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        self.check_round(message.of_kind("weights").round)
        w = message.take("weights", task.like.shape, task.like)
        trained, _ = train_locally(task, w, clients, self.local_steps, self.lr, self.batch_size)
        if any(client.statistics is not None for client in clients):
            raise ConfigError("statistics of batch normalisation travel without noise: use a network without them")
        question = message.encode()
        return [
            self.reply(client, message.round, question, clipped(w_m - w, self.clip), {})
            for client, w_m in zip(clients, trained, strict=True)
        ]
