"""What of the replies of an exchange can be used: the rest is left out row by row, and counted by why.

Not finite is plain. Extreme is what measures ten times the median (`Method.extreme`), in any of the ways a method
measures its rows (`Method.check`): numbers can be finite and still drown every other row, or stall the integration.
Honest rows stay far below (docs/robustness.md); and the median moves only when half of all rows are corrupted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ntkfl.errors import MessageError, NotFinite, NTKFLError
from ntkfl.methods import Method, Task
from ntkfl.wire import Message

NOT_FINITE, TOO_LARGE, MALFORMED = "not finite", "extreme", "malformed"


@dataclass
class Filtered:
    """Replies that the method's round can use, how many rows they are, rows rejected by reason, and of how many replies
    some were.
    """

    replies: list[Message] = field(default_factory=list)
    rows: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    touched: int = 0


def filter_replies(method: Method, task: Task, replies: Sequence[Message]) -> Filtered:
    """Replies without the rows that fail the method's checks, and without those that are extreme among all.

    A row is a sample's where the method sends such, else a client's whole reply. Replies that are good are looked at
    once and passed on as they are.
    """
    kept = Filtered()
    forms = [_form(reply) for reply in replies]
    usual = Counter(forms).most_common(1)[0][0] if replies else None
    good: list[tuple[Message, Tensor | None]] = []
    for reply, form in zip(replies, forms, strict=True):
        rejected: Counter[str] = Counter()
        if form == usual:
            good += _checked(method, task, [reply], rejected)
        else:
            rejected[MALFORMED] += len(_split(method, reply))
        kept.rejected += rejected
        kept.touched += bool(rejected)
    measured = [sizes for _, sizes in good if sizes is not None]
    within = iter(_within(measured, _bounds(measured, method.extreme)))
    for reply, sizes in good:
        keep = None if sizes is None else next(within)
        if keep is None or bool(keep.all()):
            kept.replies.append(reply)
            kept.rows += len(_split(method, reply)) if sizes is None else len(sizes)
            continue
        kept.touched += 1
        kept.rejected[TOO_LARGE] += int((~keep).sum())
        if bool(keep.any()):
            rows = [row for row, kept in zip(method.split(reply), keep.tolist(), strict=True) if kept]
            kept.replies += method.join(rows)
            kept.rows += len(rows)
    return kept


def _form(reply: Message) -> Hashable:
    """What all replies of an exchange have in common, but for their numbers of rows."""
    arrays = [
        (name, a.dtype, a.ndim, a.shape if a.ndim == 1 and a.is_floating_point() else a.shape[1:])
        for name, a in reply.arrays.items()
    ]
    return (reply.kind, reply.round, tuple(arrays))


def _checked(
    method: Method, task: Task, rows: list[Message], rejected: Counter[str]
) -> list[tuple[Message, Tensor | None]]:
    """One reply of the rows that pass the method's checks, with their sizes: at once where all do, else by halves."""
    try:
        reply = rows[0] if len(rows) == 1 else _one(method.join(rows))
        return [(reply, method.check(task, reply))]
    except NTKFLError as error:
        if len(rows) == 1:
            rows = _split(method, rows[0])
        if len(rows) == 1:
            rejected[NOT_FINITE if isinstance(error, NotFinite) else MALFORMED] += 1
            return []
    middle = len(rows) // 2
    halves = [_checked(method, task, half, rejected) for half in (rows[:middle], rows[middle:])]
    parts = [part for half in halves for part in half]
    if len(parts) < 2:
        return parts
    sizes = [own for _, own in parts if own is not None]
    try:
        whole = _one(method.join([row for reply, _ in parts for row in _split(method, reply)]))
    except MessageError:  # each half is good, and they do not fit together
        return parts
    return [(whole, torch.cat(sizes) if sizes else None)]


def _one(replies: list[Message]) -> Message:
    if len(replies) != 1:
        raise MessageError("rows of several replies")
    return replies[0]


def _split(method: Method, reply: Message) -> list[Message]:
    """The rows that a method splits a reply into; the reply itself where it cannot."""
    try:
        return method.split(reply) or [reply]
    except (NTKFLError, TypeError):  # a number where there should be rows
        return [reply]


def _bounds(sizes: list[Tensor], extreme: Sequence[float]) -> Tensor | None:
    """The largest that a row may be, [k]: by the median of those that are not zero, as dead units make many so."""
    if not sizes:
        return None
    rows = torch.cat(sizes).double()
    if not len(rows):
        return torch.zeros(len(extreme), dtype=rows.dtype)
    medians = rows.masked_fill(rows <= 0, math.nan).nanmedian(0).values
    return torch.tensor(extreme) * medians.nan_to_num(0.0, posinf=math.inf)


def _within(sizes: list[Tensor], bounds: Tensor | None) -> list[Tensor | None]:
    """Which rows of each reply are within the bounds; None for each where all are."""
    if bounds is None:
        return []
    keep = (torch.cat(sizes) <= bounds).all(1)
    return [None] * len(sizes) if bool(keep.all()) else list(torch.split(keep, [len(own) for own in sizes]))
