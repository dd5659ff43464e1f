"""The rows of a capture as the aggregator has them: Jacobians, outputs and labels, decoded and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkfl.audit.capture import Capture
from ntkfl.methods.inspection import LocalUpdate
from ntkfl.tangent import Jacobian, concatenate


@dataclass(frozen=True)
class Rows:
    """J [n, d2, d] in the form it came in, outputs [n, d2], labels [n]; `index` are the rows' places in the round."""

    J: Jacobian
    outputs: Tensor
    labels: Tensor
    index: Tensor


def sends_rows(capture: Capture) -> bool:
    """Whether clients send a Jacobian a sample rather than one update each."""
    return capture.method.shows == "rows"


def local_updates(capture: Capture, clients: int | None = None) -> list[LocalUpdate]:
    """What the first clients' replies tell of their local models; none where they do not, or not of all."""
    if capture.method.shows != "updates":
        return []
    replies, w = capture.uploads[:clients], capture.weights
    updates = [capture.method.local_update(reply, w) for reply in replies]
    known = [update for update in updates if update is not None]
    return known if len(known) == len(replies) else []


def spread(capture: Capture, count: int) -> list[int]:
    """`count` rows of a round, evenly spread over it, so that few of them are one client's."""
    total = sum(len(y) for _, y in capture.truth)
    count = min(count, total)
    return [i * total // count for i in range(count)]


def rows_of(capture: Capture, wanted: Sequence[int] | None = None) -> Rows:
    """The rows `wanted` (places in the round, ascending; all if None)."""
    at, parts = 0, []
    for upload in capture.uploads:
        J, outputs, labels = capture.method.read_rows(capture.task, upload)
        here = range(len(J)) if wanted is None else [i - at for i in wanted if 0 <= i - at < len(J)]
        if len(here):
            index = torch.tensor(list(here))
            parts.append((J[index], outputs[index], labels[index], index + at))
        at += len(J)
    Js, *tensors = zip(*parts, strict=True)
    return Rows(concatenate(list(Js)), *(torch.cat(t) for t in tensors))
