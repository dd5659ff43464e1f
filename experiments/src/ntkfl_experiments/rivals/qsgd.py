"""QSGD and FedCOM: clients send their update with every value rounded at random, without bias, to one of a few levels.

Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, 2017. Haddadpour et al.,
Federated Learning with Compression: Unified Analysis and Sharp Guarantees, 2021. With Δ_m = (w − w_m) / lr,

    w ← w − lr γ Σ_m p_m Q(Δ_m),    Q(v)_i = ‖v‖ sign(v_i) ξ_i / s,    E Q(v) = v,

ξ_i being one of the two integers around s |v_i| / ‖v‖, s = 2^(bits−1) − 1. A vector travels as one norm (float32) and
its levels ±ξ_i at a fixed width: sign, then magnitude.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ntkfl.errors import MessageError, NumericalError
from ntkfl.methods.averaging.local_training import LocalTraining
from ntkfl.methods.base import Method, Round
from ntkfl.methods.replies import WEIGHTS, Update
from ntkfl.methods.task import ClientRound, State, Task
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire.message import Message

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
Levels = NDArray[np.int32]


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

    replies: ClassVar[Mapping[str, type[Update]]] = {"weights": Quantised}

    local_steps: int = Field(1, ge=1, description="gradient steps a client takes in a round; 1: it sends its gradient")


def top_level(bits: int) -> int:
    """s: the largest magnitude that fits beside a sign."""
    return int(2 ** (bits - 1) - 1)


def quantize(vector: Tensor, bits: int, uniforms: Floats, norm: str = "l2") -> tuple[Levels, float]:
    """Levels [n] of a vector [n] and its norm ("l2", or "max" for the largest value), rounded up to float32, so that no
    level exceeds s. `uniforms` [n] are draws from [0, 1).
    """
    values = vector.detach().cpu().double().numpy()
    if not np.isfinite(values).all():
        raise NumericalError("a vector to quantise has values that are not finite: the training diverged")
    sizes = np.abs(values)
    exact = sizes.max(initial=0.0)
    if norm == "l2" and exact > 0:  # relative to the largest value: squares neither overflow nor vanish
        exact *= np.sqrt(np.square(sizes / exact).sum())
    with np.errstate(over="ignore"):
        rounded = np.float32(exact)
    rounded = np.nextafter(rounded, np.float32(np.inf)) if rounded < exact else rounded
    if not np.isfinite(rounded):
        raise NumericalError("a vector to quantise is too large for float32: the training diverged")
    wanted = top_level(bits) * (sizes / (float(rounded) or 1.0))
    levels = np.floor(wanted)
    levels += uniforms < wanted - levels
    return np.copysign(levels, values).astype(np.int32), float(rounded)


def dequantize(levels: Levels, norm: float, bits: int) -> Tensor:
    """Q(v) [n], in float64."""
    return torch.from_numpy(norm * (levels / top_level(bits)))


def encode_levels(levels: Levels, bits: int) -> Bytes:
    """The levels' bytes, `bits` bits a value; bits to spare in the last one are zero."""
    codes = np.abs(levels) | (levels < 0).astype(np.int32) << (bits - 1)
    return np.packbits(codes[:, None] >> np.arange(bits)[::-1] & 1)


def decode_levels(data: Bytes, n: int, bits: int) -> Levels:
    """The n levels that `data` encodes; `MessageError` if it does not encode exactly that many."""
    if len(data) != -(-n * bits // 8):
        raise MessageError(f"{n} levels of {bits} bits take {-(-n * bits // 8)} bytes, not {len(data)}")
    stream = np.unpackbits(data)
    if stream[n * bits :].any():
        raise MessageError("a quantised vector has bits too many")
    codes = stream[: n * bits].reshape(n, bits) @ (1 << np.arange(bits, dtype=np.int32)[::-1])
    sign = 1 << (bits - 1)
    if (codes == sign).any():
        raise MessageError("a quantised vector has a level of minus zero")
    return np.where(codes & sign, -(codes ^ sign), codes).astype(np.int32)
