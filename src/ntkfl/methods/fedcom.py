"""FedCOM and FedCOMGATE. Haddadpour et al., Federated Learning with Compression: Unified Analysis and Sharp Guarantees,
2021.

Clients train locally and send their update quantised. With gradient tracking (FedCOMGATE), each client also keeps an
estimate δ_m of how its gradient differs from the others', and takes it off its local gradients.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar

import torch
from pydantic import Field

from ntkfl.errors import ConfigError, MessageError
from ntkfl.methods.base import ClientRound, Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.local_training import mean_loss, report, take_vector
from ntkfl.methods.qsgd import Compression
from ntkfl.wire import Message


class FedCOM(Compression):
    """Δ_m = Q((w − w_m) / lr), Δ = Σ_m p_m Δ_m, w ← w − lr server_lr Δ.

    With `tracking`, the τ local steps are v ← v − lr (∇L_m(v) − δ_m) from δ_m = 0, and after the round
    δ_m ← δ_m + (Δ_m − Δ) / τ. Without noise Δ_m/τ is about ∇L_m − δ_m and Σ_m p_m δ_m = 0, so that δ_m becomes
    ∇L_m − Σ_j p_j ∇L_j and every client steps along the common gradient. The server sends Δ to the round's clients in a
    second message, as those of the next round are others.

    Q is unbiased, as the paper's analysis asks: random rounding to 8 bits, scaled by the largest value.
    """

    name: ClassVar[str] = "fedcom"
    paper: ClassVar[str] = "Haddadpour et al. 2021"

    bits: int = Field(8, ge=2, le=16, description="sign and magnitude of a value: s = 2^(bits−1) − 1 levels")
    norm: str = Field("max", description="what a bucket's levels divide: l2 (its 2-norm) or max (its largest value)")
    server_lr: float = Field(1.0, gt=0, description="γ, the server's step along the averaged update")
    tracking: bool = Field(False, description="gradient tracking: FedCOMGATE")

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.tracking and (self.local_epochs, self.most_local_steps) != (None, None):
            raise ConfigError("gradient tracking needs clients that take equally many steps: give local_steps instead")

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        w = state["weights"]
        replies = yield Message("weights", round, {"weights": w})
        p = self.client_weights(replies, w)
        delta = self.combine((self.decompress(reply.of_kind("update"), w) for reply in replies), p)
        new = check_finite(w - self.lr * self.server_lr * delta, "the model")
        if self.tracking:
            yield Message("update", round, {"average": delta})
        return Outcome({"weights": new}, mean_loss(replies, p))

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        if message.kind == "update":
            return self._track(task, message, clients)
        w = take_vector(message, "weights", "weights", task.like)
        if self.tracking:
            offsets = torch.stack([client.memory.get("offset", torch.zeros_like(w)).to(w) for client in clients])
            result = self.train(task, w, clients, lambda gradients, v: gradients - offsets)
        else:
            result = self.train(task, w, clients)
        replies = [
            Message("update", message.round, self.compress((w - w_m) / self.lr, client) | report(client, loss))
            for client, w_m, loss in zip(clients, *result, strict=True)
        ]
        if self.tracking:
            for client, reply in zip(clients, replies, strict=True):
                client.memory["sent"] = self.decompress(reply, w)
        return replies

    def _track(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        """δ_m ← δ_m + (Δ_m − Δ) / τ. The reply only says that it was done."""
        delta = take_vector(message, "update", "average", task.like)
        if any("sent" not in client.memory for client in clients):
            raise MessageError("an averaged update for a client that has sent none in this round")
        for client in clients:
            change = (client.memory.pop("sent").to(delta) - delta) / self.local_steps
            client.memory["offset"] = client.memory.get("offset", torch.zeros_like(delta)).to(delta) + change
        return [Message("update", message.round, {}) for _ in clients]
