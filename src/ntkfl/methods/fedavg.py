"""Federated averaging. McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

Each client of the round descends its own loss from the broadcast weights; the server averages where they end.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ntkfl.errors import ConfigError
from ntkfl.methods.base import ClientRound, Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.local_training import LocalTraining, mean_loss, report, take_vector
from ntkfl.privacy.noise import noisy_rows
from ntkfl.wire import Message


class FedAvg(LocalTraining):
    """w ← Σ_m p_m w_m."""

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al. 2017"
    noises: ClassVar[bool] = True
    additive: ClassVar[bool] = True

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.noise and self.weighting != "uniform":
            raise ConfigError("with noise, clients count equally: a number of samples would travel without any")

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        w = state["weights"]
        replies = yield Message("weights", round, {"weights": w})
        p = self.client_weights(replies, w)
        new = self.combine((self.take(reply, "weights", w, w) for reply in replies), p, w)
        return Outcome({"weights": check_finite(new, "the averaged model")}, mean_loss(replies, p))

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        w = take_vector(message, "weights", "weights", task.like)
        result = self.train(task, w, clients)
        question = b"" if self.clip is None else message.encode()
        replies = []
        for client, w_m, loss in zip(clients, *result, strict=True):
            arrays = self.pack("weights", self._hidden(client, w_m, w, question), w) | self._told(client, loss)
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
