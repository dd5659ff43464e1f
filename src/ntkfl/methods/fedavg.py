"""Federated averaging. McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

Each client of the round descends its own loss from the broadcast weights; the server averages where they end.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import ConfigError
from ntkfl.methods.base import ClientRound, Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.inspection import Participation
from ntkfl.methods.local_training import LocalTraining, mean_loss, report, take_vector
from ntkfl.privacy.accounting import Guarantee, client_guarantees
from ntkfl.privacy.noise import noisy_rows
from ntkfl.wire import Message


class FedAvg(LocalTraining):
    """w ← Σ_m p_m w_m."""

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al. 2017"
    additive: ClassVar[bool] = True

    clip: float | None = Field(None, gt=0, description="bound on the 2-norm of a client's update; none: no bound")
    noise: float = Field(0.0, ge=0, description="standard deviation of the Gaussian noise on it, in units of clip")

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.noise and self.clip is None:
            raise ConfigError("noise is measured in units of clip: give clip too, for example 10")
        if self.noise and self.weighting != "uniform":
            raise ConfigError("with noise, clients count equally: a number of samples would travel without any")

    @property
    def adds_noise(self) -> bool:
        return self.noise > 0

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        w = state["weights"]
        replies = yield Message("weights", round, {"weights": w})
        p = self.client_weights(replies, w)
        new = self.combine((self.take(reply, "weights", w) for reply in replies), p, w)
        return Outcome({"weights": check_finite(new, "the averaged model")}, mean_loss(replies, p))

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        w = take_vector(message, "weights", "weights", task.like)
        result = self.train(task, w, clients)
        question = b"" if self.clip is None else message.encode()
        replies = []
        for client, w_m, loss in zip(clients, *result, strict=True):
            arrays = {"weights": self._hidden(client, w_m, w, question)} | self._told(client, loss)
            replies.append(Message("update", message.round, arrays))
        return replies

    def _hidden(self, client: ClientRound, w_m: Tensor, w: Tensor, question: bytes) -> Tensor:
        """w + clip(w_m − w) + noise, where there is to be noise; w_m otherwise.

        The noise is of the question: a server that sends other weights within the round must not get the same noise on
        another update, and the first update's difference from it in plain.
        """
        if self.clip is None:
            return w_m
        if client.statistics is not None:
            raise ConfigError("statistics of batch normalisation travel without noise: use a network without them")
        own = client.randomness.for_question(question)
        return w + noisy_rows((w_m - w).unsqueeze(0), self.clip, self.noise, own)[0]

    def _told(self, client: ClientRound, loss: Tensor) -> dict[str, Tensor]:
        """Beside a noisy update, nothing of the client's own: no loss, and no number of samples."""
        return {"samples": torch.tensor(1, dtype=torch.int32)} if self.noise else report(client, loss)

    def promise(self, cohort: int, rounds: int) -> list[str]:
        return (
            ["noise follows from the seed and hides nothing: an ε of this run is a simulation's"] if self.noise else []
        )

    @property
    def counts_on_draws(self) -> bool:
        """The guarantee against those who see models alone does."""
        return self.noise > 0

    def guarantees(self, run: Participation) -> list[Guarantee]:
        """Of a client, whose update is noised."""
        numbers = {"cohort": run.cohort, "clients": run.clients, "rounds": run.rounds, "times": run.times}
        return client_guarantees(self.noise, **numbers, simulated=run.simulated)
