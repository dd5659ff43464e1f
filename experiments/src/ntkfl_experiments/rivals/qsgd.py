"""QSGD and FedCOM: clients send their update with every value rounded at random, without bias, to one of a few levels.

Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, 2017. Haddadpour et al.,
Federated Learning with Compression: Unified Analysis and Sharp Guarantees, 2021. With Δ_m = (w − w_m) / lr,

    w ← w − lr γ Σ_m p_m Q(Δ_m),    Q(v)_i = ‖v‖ sign(v_i) ξ_i / s,    E Q(v) = v,

ξ_i being one of the two integers around s |v_i| / ‖v‖: `quantize.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.methods.averaging.local_training import LocalTraining
from ntkfl.methods.base import Method, Round
from ntkfl.methods.replies import WEIGHTS, Update
from ntkfl.methods.task import ClientRound, State, Task
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire.message import Message
from ntkfl_experiments.rivals.quantize import decode_levels, dequantize, encode_levels, quantize


class Quantised(Update):
    """Q(v) of a vector v [d], as `codes` (a level of `bits` for each value) and `norms` [1] (what the levels divide).

    `norm` is l2 (the vector's 2-norm, as QSGD's bounds are about) or max (its largest value).
    """

    vectors = ("gradient",)
    additive = False
    bits: ClassVar[int] = 4
    norm: ClassVar[str] = "l2"

    @classmethod
    def blank(cls, method: Method, task: Task, question: Message) -> Self:
        plain = Update.blank(method, task, question)
        del plain.arrays[WEIGHTS]
        return cls(cls.encode(torch.zeros_like(task.like), Randomness.simulated(0)) | plain.arrays)

    @classmethod
    def encode(cls, vector: Tensor, randomness: Randomness) -> dict[str, Tensor]:
        """Q(vector) as arrays, rounded by the client's own draws."""
        levels, norm = quantize(vector, cls.bits, randomness.uniforms("quantisation", vector.numel()), cls.norm)
        return {"codes": torch.from_numpy(encode_levels(levels, cls.bits)), "norms": torch.tensor([norm]).float()}

    def vector(self, name: str, like: Tensor) -> Tensor:
        """Q(v) [d]; `MessageError` for codes of another length, or of no level."""
        codes, norms = self.take("codes", (None,)), self.take("norms", (1,))
        if codes.dtype != torch.uint8 or norms.dtype != torch.float32 or float(norms) < 0:
            raise MessageError("a quantised vector needs bytes of codes and a norm that is not negative")
        levels = decode_levels(codes.cpu().numpy(), like.numel(), self.bits)
        return dequantize(levels, float(norms), self.bits).to(like)

    def with_vectors(self, vectors: Mapping[str, Tensor]) -> Self:
        """The reply with another vector, rounded anew by draws that repeat: for studies of Byzantine clients."""
        return type(self)(self.arrays | self.encode(vectors["gradient"], Randomness.simulated(0)))


class EightBits(Quantised):
    """In 8 bits, scaled by the largest value."""

    bits = 8
    norm = "max"


class FedCOM(LocalTraining):
    """w ← w − lr γ Σ_m p_m Q((w − w_m) / lr), in 8 bits."""

    paper: ClassVar[str] = "Haddadpour et al. 2021"
    replies: ClassVar[Mapping[str, type[Update]]] = {"weights": EightBits}

    server_lr: float = Field(1.0, gt=0, description="γ, the server's step along the averaged update")

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """One exchange: d numbers down, `bits` bits a number up."""
        replies = yield self.question(state, round)
        p = self.shares(task, replies)
        delta = self.combined(task, replies, p, "gradient")
        return self.outcome(replies, p, state | {"weights": state["weights"] - self.lr * self.server_lr * delta})

    def answer(self, task: Task, question: Message, client: ClientRound) -> Update:
        """Q((w − w_m) / lr). Uplink: `bits` bits per weight, and one norm."""
        w = self.begin(task, question)
        trained = self.train(task, w, client)
        reply = self.replies["weights"]
        assert issubclass(reply, Quantised)
        return self.update(client, trained, **reply.encode((w - trained.weights) / self.lr, client.randomness))


class QSGD(FedCOM):
    """The same with 4 bits, the 2-norm, and one local step: w ← w − lr Σ_m p_m Q(g_m) for the clients' gradients g_m.

    This is the variant that the paper's bounds are about. Its practical one has buckets (512 values or so) and the max
    norm.
    """

    paper: ClassVar[str] = "Alistarh et al. 2017"
    replies: ClassVar[Mapping[str, type[Update]]] = {"weights": Quantised}

    local_steps: int = Field(1, ge=1, description="gradient steps a client takes in a round; 1: it sends its gradient")
