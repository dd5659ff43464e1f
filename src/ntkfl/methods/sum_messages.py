"""What clients of NTK-FL from sums send: sums, losses and counts, packed, read and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ntkfl.devices import joined_on
from ntkfl.errors import MessageError
from ntkfl.tangent import Sums
from ntkfl.tangent.sums import GRADIENT, SAMPLES
from ntkfl.wire import Message
from ntkfl.wire.halves import EXPONENTS, unpack_halves, unpack_halves_together

LOSSES, FRESH = "losses", "fresh"  # sums of losses; how many samples are behind constant factors
_OWN = (SAMPLES, LOSSES, FRESH, EXPONENTS)
_ALL = "sums of all"  # in what was read of a reply


class Reply(NamedTuple):
    """What one client's update, or a sum of several, holds. Of several side by side, all has a first dimension more."""

    sums: Sums
    losses: Tensor  # at the weights and at each alternative, float64 [1 + S]
    fresh: Tensor  # samples behind the constant factors, []

    def plus(self, other: Reply) -> Reply:
        return Reply(self.sums + other.sums, self.losses + other.losses, self.fresh + other.fresh)


def read_sums(reply: Message, weights: Tensor, like: Tensor, total: bool) -> Reply:
    """A client's sums, or with `total` those of many, everything checked; in the type and on the device of `like`."""
    arrays = take_arrays(reply.of_kind("update"), [name for name in reply.arrays if name not in _OWN], like)
    samples, fresh, losses = _counts(reply, total)
    sums = Sums(arrays | {SAMPLES: samples.to(like)})
    _check_arrays(sums, weights)
    return Reply(sums, losses.to(device=like.device, dtype=torch.float64), fresh.to(like))


def read_together(replies: Sequence[Message], weights: Tensor) -> Reply:
    """`read_sums` of replies in float16 with the same names, as one on the device of the weights: arrays [replies, …].
    Each reply remembers its place.
    """
    first = replies[0].of_kind("update")
    names = [name for name in first.arrays if name not in _OWN]
    for name, array in first.arrays.items():
        if any(reply.arrays[name].shape != array.shape for reply in replies):
            raise MessageError(f"replies whose {name!r} differ in shape")
    stacks = joined_on(weights.device, [[r.arrays[name].unsqueeze(0) for r in replies] for name in names])
    arrays = dict(zip(names, stacks, strict=True))
    arrays[EXPONENTS] = torch.stack([reply.arrays[EXPONENTS] for reply in replies])
    arrays = unpack_halves_together(Message(first.kind, first.round, arrays), names, weights)
    samples, fresh, losses = (torch.stack(same) for same in zip(*(_counts(r, False) for r in replies), strict=True))
    _check_arrays(Sums({name: array[0] for name, array in arrays.items()} | {SAMPLES: samples[0]}), weights)
    whole = Reply(
        Sums(arrays | {SAMPLES: samples.to(weights)}), losses.to(weights.device, torch.float64), fresh.to(weights)
    )
    for at, reply in enumerate(replies):
        reply.read[_ALL] = (whole, at)
    return whole


def added_up(replies: Sequence[Message]) -> Reply | None:
    """The sum of replies that were read together; None where they were not."""
    found = _read_before(replies)
    if found is None:
        return None
    whole, index = found
    sums = Sums({name: array[index].sum(0) for name, array in whole.sums.arrays.items()})
    return Reply(sums, whole.losses[index].sum(0), whole.fresh[index].sum())


def gradients_apart(replies: Sequence[Message]) -> list[Sums]:
    """Each one's gradient and samples, of replies that were read together; empty where they were not."""
    found = _read_before(replies)
    if found is None:
        return []
    whole, index = found
    gradients, samples = (whole.sums.arrays[name][index] for name in (GRADIENT, SAMPLES))
    return [Sums({GRADIENT: g, SAMPLES: n}) for g, n in zip(gradients, samples, strict=True)]


def _read_before(replies: Sequence[Message]) -> tuple[Reply, Tensor] | None:
    """What `read_together` read, and the replies' places in it."""
    places = [reply.read.get(_ALL, (None, 0)) for reply in replies]
    whole: Reply | None = places[0][0] if places else None
    if whole is None or any(own is not whole for own, _ in places):
        return None
    return whole, torch.tensor([at for _, at in places], device=whole.losses.device)


def sizes(arrays: Mapping[str, Tensor], weights: Tensor) -> Tensor:
    """Of each client's sums in arrays [clients, …], two sizes, float64 [clients, 2]: its samples; the largest norm of
    its means, or that of the weights where it is larger.
    """
    samples = arrays[SAMPLES].double()
    others = [array.flatten(1) for name, array in arrays.items() if name != SAMPLES]
    norms = [torch.linalg.vector_norm(array, dim=1) for array in others]  # inf: extreme too
    largest = torch.stack([weights.norm() * samples, *norms]).amax(0) / samples
    return torch.stack([samples, largest], dim=1)


def take_arrays(message: Message, names: Sequence[str], like: Tensor) -> dict[str, Tensor]:
    if EXPONENTS in message.arrays:
        return unpack_halves(message, names, like)
    return {name: message.take(name, None, like) for name in names}


def pack_steps(alternatives: Tensor | None) -> dict[str, Tensor]:
    """How far alternatives [S, d] lie from the weights, in 8 bits: what is judged is one number for all of them."""
    if alternatives is None:
        return {}
    scales = (alternatives.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return {"steps": (alternatives / scales).round().to(torch.int8), "scales": scales[:, 0].float()}


def take_steps(message: Message, like: Tensor) -> Tensor:
    """[S, d]; no row where there are none."""
    if "steps" not in message.arrays:
        return like.new_empty(0, like.numel())
    steps = message.take("steps", (None, like.numel()), like)
    return steps * message.take("scales", (len(steps),), like).unsqueeze(1)


def _check_arrays(sums: Sums, weights: Tensor) -> None:
    """`MessageError` unless they are sums over a network with these weights."""
    if GRADIENT not in sums.arrays or sums.arrays[GRADIENT].shape != weights.shape:
        raise MessageError(f"sums without a gradient of {weights.numel()} weights")
    sums.layers()


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
