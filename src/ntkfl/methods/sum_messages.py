"""What clients of NTK-FL from sums send: sums, losses and counts, read and checked."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.tangent import Sums
from ntkfl.tangent.sums import GRADIENT, REST, SAMPLES
from ntkfl.wire import Message

LOSSES, FRESH = "losses", "fresh"  # sums of losses; how many samples are behind constant factors
ROUGH = 2.0**-5  # of the accepted weights' norm, by which 8 bits may miss them
_WEIGHTS, _ACCEPTED, _STEP, _SCALE = "weights", "accepted", "step", "scale"


class Reply(NamedTuple):
    """What one client's update, or a sum of several, holds."""

    sums: Sums
    losses: Tensor  # at the weights and, after the first round, at the last accepted ones; float64 [1] or [2]
    fresh: Tensor  # samples behind the constant factors, []

    def plus(self, other: Reply) -> Reply:
        return Reply(self.sums + other.sums, self.losses + other.losses, self.fresh + other.fresh)


def read_sums(reply: Message, weights: Tensor, like: Tensor, total: bool) -> Reply:
    """A client's sums, or with `total` those of many, everything checked; in the type and on the device of `like`.
    Arrays that are none of them are a derived method's own.
    """
    names = [name for name in reply.of_kind("update").arrays if name in (GRADIENT, REST) or "/" in name]
    samples, fresh, losses = _counts(reply, total)
    sums = Sums({name: reply.take(name, None, like) for name in names} | {SAMPLES: samples.to(like)})
    if GRADIENT not in sums.arrays or sums.arrays[GRADIENT].shape != weights.shape:
        raise MessageError(f"sums without a gradient of {weights.numel()} weights")
    sums.layers()
    return Reply(sums, losses.to(device=like.device, dtype=torch.float64), fresh.to(like))


def sizes(reply: Reply, weights: Tensor) -> Tensor:
    """Of a client's sums two sizes, float64 [1, 2]: its samples; the largest norm of its means, or that of the weights
    where it is larger.
    """
    samples = reply.sums.arrays[SAMPLES].double()
    norms = [torch.linalg.vector_norm(a) for name, a in reply.sums.arrays.items() if name != SAMPLES]  # inf: extreme
    largest = torch.stack([weights.norm() * samples, *norms]).amax() / samples
    return torch.stack([samples, largest]).unsqueeze(0)


def weights_to_judge(w: Tensor, accepted: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What tells clients of the proposed and the last accepted weights [d]: (arrays of real numbers, others).

    The accepted ones travel as a step in 8 bits, which its largest number sets: what is judged is one number for all
    of it. Where that is too rough, as after a step to far-off weights, they travel whole.
    """
    if accepted is None:
        return {_WEIGHTS: w}, {}
    step = w - accepted
    scale = (step.abs().max() / 127).clamp(min=torch.finfo(torch.float32).tiny).float()
    coarse = (step / scale).round()
    if float((coarse * scale - step).norm()) <= ROUGH * float(accepted.norm()):
        return {_WEIGHTS: w}, {_STEP: coarse.to(torch.int8), _SCALE: scale}
    return {_WEIGHTS: w, _ACCEPTED: accepted}, {}


def take_accepted(message: Message, w: Tensor) -> Tensor | None:
    """[d], beside the proposed weights w; None in the first round."""
    if _ACCEPTED in message.arrays:
        return message.take(_ACCEPTED, tuple(w.shape), w)
    if _STEP not in message.arrays:
        return None
    return w - message.take(_STEP, tuple(w.shape), w) * message.take(_SCALE, (), w)


def _counts(reply: Message, total: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Samples, those behind constant factors, and losses."""
    samples = reply.take(SAMPLES, ())
    fresh = reply.take(FRESH, ()) if FRESH in reply.arrays else torch.zeros((), dtype=torch.int64)
    losses = reply.take(LOSSES, (None,))
    whole = total or int(fresh) in (0, int(samples))  # a total may be partly of clients that sent before
    if not (1 <= int(samples) < 2**31 and 0 <= int(fresh) <= int(samples) and whole):
        raise MessageError(f"sums over {int(samples)} samples, and {int(fresh)} of inputs")
    if not len(losses) or bool((losses < 0).any()):
        raise MessageError("a loss below zero, or none")
    return samples, fresh, losses
