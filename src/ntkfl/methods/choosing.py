"""The choice of t: candidates' losses as clients report them, and what the server makes of the reports."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError, NumericalError
from ntkfl.methods.base import Client, Task
from ntkfl.methods.cohort import joined
from ntkfl.methods.robust import trimmed_mean
from ntkfl.wire import Message

CHOICES = ("cohort", "validation")
OVERFLOW = 1e30  # the loss of a candidate that overflows
_OVERFLOWING_SUM = 1e300


def scores(task: Task, round: int, candidates: Tensor, clients: Sequence[Client], by_row: bool) -> list[Message]:
    """The candidates' losses, the paper's criterion with no data moved: one sum each, or `by_row` one row a sample.

    A candidate may overflow; a large finite number says so and stays a valid message.
    """
    x, y = joined([client.x for client in clients]), joined([client.y for client in clients])
    losses = task.candidate_losses(candidates, x, y)  # [S, n]
    counts = [len(client) for client in clients]
    if by_row:
        rows = losses.T.nan_to_num(nan=OVERFLOW, posinf=OVERFLOW).clamp(max=OVERFLOW)
        return [Message("losses", round, {"losses": own}) for own in torch.split(rows, counts)]
    sums = torch.stack([own.sum(1) for own in torch.split(losses, counts, dim=1)]).double()
    sums = sums.nan_to_num(nan=_OVERFLOWING_SUM, posinf=_OVERFLOWING_SUM).cpu()
    return [
        Message("losses", round, {"sums": own, "samples": torch.tensor(count, dtype=torch.int32)})
        for own, count in zip(sums, counts, strict=True)
    ]


def check_scores(reply: Message, by_row: bool) -> None:
    """`MessageError` for losses that no sample can have."""
    losses = reply.of_kind("losses").take("losses" if by_row else "sums", (None, None) if by_row else (None,))
    most = OVERFLOW if by_row else _OVERFLOWING_SUM
    if bool(((losses < 0) | (losses > 1.01 * most)).any()):
        raise MessageError(f"a loss below zero, or above {most:g}")
    if not by_row and int(reply.take("samples", ())) < 1:
        raise MessageError("losses of no samples")


def mean_losses(replies: list[Message], candidates: int, by_row: bool, trim: float) -> Tensor:
    """The cohort's mean loss of every candidate, [S]; with `trim` the trimmed mean over rows, or over clients.

    In a plain mean every client has a veto: who reports 1e30 for all candidates but one chooses that one.
    """
    if by_row:
        rows = torch.cat([r.of_kind("losses").take("losses", (None, candidates)) for r in replies]).double()
        return trimmed_mean(rows, trim) if trim else rows.mean(0)
    sums = torch.stack([r.of_kind("losses").take("sums", (candidates,)) for r in replies])
    samples = [int(r.take("samples", ())) for r in replies]
    if trim:
        return trimmed_mean(sums / torch.tensor(samples, dtype=sums.dtype).unsqueeze(1), trim)
    return sums.sum(0) / sum(samples)


def validate(task: Task, candidates: Tensor) -> Tensor:
    """The same on held-out clients."""
    if task.validation is None:
        raise ConfigError("choosing t by validation needs held-out clients: hold some out (--hold-out 10)")
    x, y = task.validation
    return task.candidate_losses(candidates, x, y).mean(1)


def least(losses: Tensor) -> int:
    """The candidate of least loss; `NumericalError` where none has one."""
    best = int(losses.nan_to_num(nan=float("inf")).argmin())
    if not bool(losses[best].isfinite()):
        raise NumericalError("no candidate has a finite loss: the evolution left the range where the network works")
    return best
