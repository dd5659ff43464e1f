"""A round's rows from the clients' uploads: no client's far outnumber the others', and none were made up where that can
be told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ntkfl.errors import TooFew
from ntkfl.methods.base import Task
from ntkfl.methods.robust import fair_counts, surplus_left_out, true_rows, verifiable
from ntkfl.tangent import Jacobian, Stack
from ntkfl.wire import Message

Read = Callable[[Task, Message], tuple[Jacobian, Tensor, Tensor]]


@dataclass
class Gathered:
    """J, outputs f0 [N, d2], labels y, the upload each row is from [N], what was left out, and whether the rows left
    were computed again.
    """

    J: Jacobian
    f0: Tensor
    y: Tensor
    senders: Tensor
    verified: bool = False
    notes: dict[str, float | str] = field(default_factory=dict)

    def keep(self, index: Tensor, note: str) -> bool:
        """Leave out all rows but those at `index`, ascending, and note how many; whether there were any."""
        lost = len(self.y) - len(index)
        if lost:
            self.notes[note] = lost
            self.J, self.f0 = self.J[index], self.f0[index]
            self.y, self.senders = self.y[index], self.senders[index]
        return bool(lost)


def gather(
    read: Read, task: Task, w: Tensor, uploads: list[Message], round: int, row_limit: float, verify: bool | None
) -> Gathered:
    """All rows of the round. Of a client with more than `row_limit` times the median client's rows, the surplus is left
    out; with `verify`, or where that is None and rows hold the inputs, so are rows that the network does not give.

    Uploads are let go one by one: a round's Jacobian is never there twice.
    """
    sent = torch.tensor([len(upload.take("outputs", (None, task.outputs))) for upload in uploads])
    fair = fair_counts(sent, row_limit)
    stack: Stack | None = None
    f0, y, counts, made_up, verified = [], [], [], 0, verify
    for most in fair.tolist():
        J, f, labels = read(task, uploads.pop(0))
        if verified is None:
            verified = verifiable(task, w, J)
        if len(J) > most:
            drawn = surplus_left_out(len(J), most, round).to(f.device)
            J, f, labels = J[drawn], f[drawn], labels[drawn]
        if verified and not bool((true := true_rows(task, w, J, f)).all()):
            made_up += int((~true).sum())
            J, f, labels = J[true], f[true], labels[true]
        counts.append(len(J))
        if len(fair) == 1 and len(J):
            return Gathered(J, f, labels, labels.new_zeros(len(J)).long(), bool(verified), _notes(0, made_up))
        stack = stack or Stack(int(fair.sum()))
        if len(J):
            stack.add(J)
            f0.append(f)
            y.append(labels)
    if not f0 or stack is None:
        needs = "verify needs a network that begins with a linear layer"
        raise TooFew(f"none of {made_up} rows is what the network gives at the input it holds; {needs}")
    senders = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(f0[0].device)
    notes = _notes(int((sent - fair).sum()), made_up)
    return Gathered(stack.whole(), torch.cat(f0), torch.cat(y), senders, bool(verified), notes)


def _notes(surplus: int, made_up: int) -> dict[str, float | str]:
    counts = {"surplus_rows": surplus, "made_up_rows": made_up}
    return {name: count for name, count in counts.items() if count}
