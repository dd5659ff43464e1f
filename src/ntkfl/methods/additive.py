"""Replies that add up: what a client contributes to a sum, and what a sum stands for.

A method whose server needs only a total gives `summand`, a client's reply as named arrays with a limit for their
numbers, and `from_total`, the one reply that stands for the total of many. `federation/secure_sum.py` carries them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.wire import Message

LARGEST_LOSS, MOST_STEPS = 100.0, 1e5  # of a sample, and of a client in a round
_SAMPLES, _WEIGHTS = "samples", "weights"


class Addend(NamedTuple):
    """An array that is summed over clients, and the largest absolute value that one client's numbers may have.

    `by_samples`: only a client of more than `sum_samples` samples has numbers beyond it.
    """

    values: Tensor
    limit: float
    by_samples: bool = False


Summand = dict[str, Addend]


def update_summand(message: Message, reply: Message, most_samples: int | None, limit: float) -> Summand:
    """A local update: p·v for every array v of it, weights as their change from those broadcast.

    p is 1; with `most_samples`, the client's samples over that, at most 1, and the samples are summed too.
    """
    samples = int(reply.take(_SAMPLES, ()))
    if samples < 1:
        raise MessageError("a client reports that it trained on no samples")
    p, summand = 1.0, {}
    if most_samples is not None:
        counted = float(min(samples, most_samples))
        p = counted / most_samples
        summand[_SAMPLES] = Addend(torch.tensor(counted, dtype=torch.float64), float(most_samples))
    limits = {"loss": LARGEST_LOSS, "steps": MOST_STEPS}
    for name in reply.arrays:
        value = reply.take(name).double().cpu()
        if name == _WEIGHTS:
            base = message.take(_WEIGHTS).double().cpu()
            value = reply.take(name, tuple(base.shape)).double().cpu() - base
        if name != _SAMPLES:
            summand[name] = Addend(p * value, limits.get(name, limit))
    return summand


def mean_update(
    message: Message, total: Mapping[str, Tensor], clients: int, most_samples: int | None, like: Tensor
) -> Message:
    """The update that stands for the total of `clients`: Σ p v / Σ p, weights added to those broadcast."""
    count = float(clients if most_samples is None else total[_SAMPLES])
    if count < 1:
        raise MessageError("a total over no samples")
    weight = count / (most_samples or 1)
    arrays = {name: array / weight for name, array in total.items() if name != _SAMPLES}
    if _WEIGHTS in arrays:
        arrays[_WEIGHTS] = message.take(_WEIGHTS).double().cpu() + arrays[_WEIGHTS]
    if "steps" in arrays:
        arrays["steps"].clamp_(min=1)  # as every client's are; rounding may leave a little less
    told = {_SAMPLES: torch.tensor(round(count), dtype=torch.int64)}
    return Message("update", message.round, {name: array.to(like.dtype) for name, array in arrays.items()} | told)
