"""QSGD. Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, 2017.

Clients send their gradient with every value rounded at random, and without bias, to one of a few levels.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.methods.base import ClientRound, Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.corruption import change_of
from ntkfl.methods.inspection import Corruption
from ntkfl.methods.local_training import LocalTraining, mean_loss, report, take_vector
from ntkfl.wire import Message
from ntkfl.wire.quantize import decode_levels, dequantize, encode_levels, quantize


class Compression(LocalTraining):
    """Methods whose clients send quantised vectors: both ends of the quantiser."""

    vectors: ClassVar[tuple[str, ...]] = ()
    bits: ClassVar[int]  # sign and magnitude of a value: s = 2^(bits−1) − 1 levels
    norm: ClassVar[str]  # what levels divide: l2 (the vector's 2-norm) or max (its largest value)

    def check(self, task: Task, reply: Message) -> Tensor | None:
        least = super().check(task, reply)
        length = self.decompress(reply.of_kind("update"), task.like.cpu()).double().norm()
        return length.reshape(1, 1) if least is None else torch.maximum(least, length)

    def compress(self, vector: Tensor, client: ClientRound) -> dict[str, Tensor]:
        """Q(vector) as arrays of a message, rounded by the client's own draws."""
        uniform = partial(client.randomness.uniforms, "quantisation")
        levels, norms = quantize(vector, self.bits, uniform, self.norm)
        codes = encode_levels(levels, self.bits)
        return {"codes": torch.from_numpy(codes), "norms": torch.from_numpy(norms)}

    def decompress(self, message: Message, like: Tensor) -> Tensor:
        """Q(vector) [d] from a message."""
        codes, norms = message.take("codes", (None,)), message.take("norms", (1,))
        if codes.dtype != torch.uint8 or norms.dtype != torch.float32 or bool((norms < 0).any()):
            raise MessageError("a quantised vector needs bytes of codes and norms that are not negative")
        levels = decode_levels(codes.numpy(), like.numel(), self.bits)
        return dequantize(levels, norms.numpy(), self.bits).to(like)

    def corrupt(
        self, corruption: Corruption, task: Task, asked: Message, reply: Message, client: ClientRound
    ) -> Message:
        if corruption.kind not in ("random", "sign-flip"):
            return super().corrupt(corruption, task, asked, reply, client)
        vector = change_of(corruption)(self.decompress(reply, task.like).unsqueeze(0))[0]
        return replace(reply, arrays={**reply.arrays, **self.compress(vector, client)})

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        w = take_vector(message, "weights", "weights", task.like)
        return [
            Message("update", message.round, self.compress((w - w_m) / self.lr, client) | report(client, loss))
            for client, w_m, loss in zip(clients, *self.train(task, w, clients), strict=True)
        ]


class QSGD(Compression):
    """w ← w − lr Σ_m p_m Q(g_m), where g_m = (w − w_m) / lr: the client's gradient, or the sum of its local steps'.

    Q(v)_i = ‖v‖ sign(v_i) ξ_i / s with ξ_i one of the two integers around s |v_i| / ‖v‖ and E Q(v) = v: the variant
    that the paper's bounds are about. Its practical one has buckets (512 values or so) and the max norm.
    """

    name: ClassVar[str] = "qsgd"
    paper: ClassVar[str] = "Alistarh et al. 2017"
    bits: ClassVar[int] = 4
    norm: ClassVar[str] = "l2"

    local_steps: int = Field(1, ge=1, description="gradient steps a client takes in a round; 1: it sends its gradient")

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        w = state["weights"]
        replies = yield Message("weights", round, {"weights": w})
        p = self.client_weights(replies, w)
        g = self.combine((self.decompress(reply.of_kind("update"), w) for reply in replies), p)
        return Outcome({"weights": check_finite(w - self.lr * g, "the model")}, mean_loss(replies, p))
