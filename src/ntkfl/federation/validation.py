"""Messages become replies: each is parsed once, and what a round cannot use is left out, row by row, and counted.

Malformed is what the type of reply cannot read. Extreme is what measures ten times the median (`Reply.extreme`), in any
of the ways the type measures it (`Reply.sizes`): numbers can be finite and still drown every other row. Honest rows
stay far below (docs/audit.md), and the median moves only when half of all rows are corrupted. Of sums, the number of
samples is one such way: a client with more than ten times the median client's is left out, and the log says so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ntkfl.errors import MessageError, NotFinite, NTKFLError
from ntkfl.federation.transport import Traffic
from ntkfl.methods import Task
from ntkfl.methods.replies import Reply
from ntkfl.wire import Message

NOT_FINITE, TOO_LARGE, MALFORMED = "not finite", "extreme", "malformed"


def filter_replies(kind: type[Reply], task: Task, messages: Sequence[Message], traffic: Traffic) -> list[Any]:
    """The replies of this kind in the messages, without rows that cannot be read or are extreme among all; what is left
    out is counted in `traffic`.

    A row is a sample's where the kind splits into such, else a client's whole reply. Three steps, each of which costs
    only the rows that fail it: messages whose arrays differ from most others' in name, type or shape; rows that cannot
    be parsed; rows with a size above `kind.extreme` times the median. A good message is parsed once, as a whole; one
    with a bad row is parsed row by row.
    """
    kept: list[Reply] = []
    good: list[Reply] = []
    forms = [_form(message) for message in messages]
    usual = Counter(forms).most_common(1)[0][0] if forms else None
    for message, form in zip(messages, forms, strict=True):
        before = traffic.rejected.total()
        if form == usual:
            good += _parsed(kind, task, message, traffic)
        else:
            rows = len(rows_of(kind, message))
            traffic.reject(MALFORMED, rows, "its arrays differ in name, type or shape from the others'")
        traffic.rejected_clients += traffic.rejected.total() > before
    sizes = [reply.sizes(task) for reply in good]
    bounds = _bounds([own for own in sizes if own is not None], kind.extreme)
    for reply, own in zip(good, sizes, strict=True):
        inside = None if own is None or bounds is None else (own <= bounds).all(1)
        if inside is None or bool(inside.all()):
            kept.append(reply)
            continue
        traffic.rejected_clients += 1
        traffic.reject(TOO_LARGE, int((~inside).sum()), "far larger than the median of all")
        kept += _joined(kind, task, [row for row, stays in zip(reply.split(), inside.tolist(), strict=True) if stays])
    return kept


def _form(message: Message) -> Hashable:
    """What all messages of an exchange have in common, but for their numbers of rows."""
    arrays = [
        (name, a.dtype, a.ndim, a.shape if a.ndim == 1 and a.is_floating_point() else a.shape[1:])
        for name, a in message.arrays.items()
    ]
    return (message.kind, message.round, tuple(arrays))


def _parsed(kind: type[Reply], task: Task, message: Message, traffic: Traffic) -> list[Reply]:
    """The reply of the message's good rows: parsed at once where all are good, else row by row."""
    with suppress(NTKFLError):
        return [kind.parse(message, task)]
    good: list[Reply] = []
    for row in rows_of(kind, message):
        try:
            good.append(kind.parse(replace(row.message(message.round), kind=message.kind), task))
        except NTKFLError as error:
            traffic.reject(NOT_FINITE if isinstance(error, NotFinite) else MALFORMED, 1, str(error))
    try:
        return _joined(kind, task, good)
    except MessageError:  # each is good, and they do not fit together
        return good


def _joined(kind: type[Reply], task: Task, rows: Sequence[Reply]) -> list[Reply]:
    """Good rows as replies, checked."""
    replies = list(kind.join(rows))
    for reply in replies:
        reply.check(task)
    return replies


def rows_of(kind: type[Reply], message: Message) -> Sequence[Reply]:
    """The rows that a message splits into; the whole of it where it does not."""
    whole = kind(message.arrays, message.halves)
    try:
        return whole.split() or [whole]
    except (NTKFLError, TypeError):  # a number where there should be rows
        return [whole]


def _bounds(sizes: list[Tensor], extreme: Sequence[float]) -> Tensor | None:
    """The largest that a row may be, [k]: by the median of those that are not zero, as dead units make many so."""
    if not sizes:
        return None
    rows, most = torch.cat(sizes).double(), torch.tensor(extreme, dtype=torch.float64)
    if not len(rows):
        return torch.zeros_like(most)
    medians = rows.masked_fill(rows <= 0, math.nan).nanmedian(0).values
    return most * medians.nan_to_num(0.0, posinf=math.inf)
