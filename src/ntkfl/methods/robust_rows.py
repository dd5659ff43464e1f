"""Bounds on what a minority of Byzantine clients does to a round of NTK-FL, from its rows to its cost.

No client's rows far outnumber the others', none were made up where that can be told, none is far longer than the others
or pulls against those of its label, and clients that resist all others are left out. Not in the paper, whose trace
kernel comes without. Each bound by itself: `robust.py`; what they do against which attack: docs/robustness.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ntkfl.errors import ConfigError, TooFew
from ntkfl.methods.base import State, Task
from ntkfl.methods.ntk_upload import NTKUpload, row_count
from ntkfl.methods.robust import (
    budget,
    clip_rows,
    fair_counts,
    no_costs,
    opposed,
    surplus_left_out,
    true_rows,
    verifiable,
    with_cost,
    without_outliers,
)
from ntkfl.tangent import Evolution, Jacobian, Stack
from ntkfl.wire import Message

ROW_LIMIT = 1.5  # rows of one client that count, at most, in units of the median client's; not shuffled
COSTS = "products"  # of the last rounds, in the server's state


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
            self.J, index = self.J[index], index.to(self.y.device)
            self.f0, self.y, self.senders = self.f0[index], self.y[index], self.senders[index]
        return bool(lost)

    def diagnostics(self, evolution: Evolution) -> dict[str, float | str]:
        """What a round's record says of its rows and of what their evolution took."""
        stats = evolution.statistics
        cost = {"samples": len(self.y), "kernel_products": stats.evaluations, "solver_error": stats.worst_error}
        return cost | self.notes | ({"solver_fallback": stats.fallback} if stats.fallback else {})


class RobustRows(NTKUpload):
    """`gather` and `agreeing` are the two places of a round at which rows are bounded."""

    row_clip: float | None = Field(
        1.5,
        gt=0,
        description="most that a row's Jacobian may measure, in units of the median row's: longer ones are scaled "
        "down; by default no bound with the paper's trace kernel",
    )
    drop_opposed: bool = Field(
        True,
        description="leave out rows that push the others of their label the wrong way; by default not with the paper's "
        "trace kernel, and not looked at where rows are computed again",
    )
    trim: float = Field(
        0.25,
        ge=0,
        lt=0.5,
        description="most of a round's clients (shuffled: rows, and by default 0) left out for resisting all others; "
        "by default 0 with the paper's trace kernel",
    )
    trim_losses: float = Field(
        0.4,
        ge=0,
        lt=0.5,
        description="share of clients left out at both ends of what they report on each candidate; 0: no client is, "
        "and samples count equally, the paper's criterion and the default with its trace kernel",
    )
    verify: bool | None = Field(
        None,
        description="the server computes factored rows again and leaves out those made up; default: where they hold "
        "the inputs",
    )

    @model_validator(mode="before")
    @classmethod
    def _bounds_by_default(cls, values: dict[str, Any]) -> dict[str, Any]:
        out = dict(values)
        if out.get("kernel") == "trace":
            out = {"trim_losses": 0.0, "row_clip": None, "drop_opposed": False} | out
        if out.get("kernel") == "trace" or out.get("shuffle", cls.model_fields["shuffle"].default):
            out.setdefault("trim", 0.0)  # single rows, which have no senders, tell too little
        return out

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.verify and (self.sparsity or self.codec == "dense"):
            raise ConfigError("verify computes rows again from the inputs that factored uploads alone hold")

    def start(self, task: Task, weights: Tensor) -> State:
        return super().start(task, weights) | {COSTS: no_costs()}

    def gather(self, task: Task, w: Tensor, uploads: list[Message], round: int) -> Gathered:
        """All rows of the round. Of a client with more than `ROW_LIMIT` times the median client's rows, the surplus is
        left out; with `verify`, or where that is None and rows hold the inputs, so are rows that the network does not
        give. Of the others none stays longer than `row_clip` says, or, with `drop_opposed`, against its own label.
        """
        rows = self._stack(task, w, uploads, round)
        if self.row_clip is not None:
            rows.J, clipped = clip_rows(rows.J, self.row_clip)
            rows.notes |= {"clipped_rows": clipped} if clipped else {}
        if self.drop_opposed and not rows.verified and not rows.y.is_floating_point():
            rows.keep((~opposed(rows.J, rows.y)).nonzero()[:, 0], "opposed_rows")
        return rows

    def agreeing(self, rows: Gathered, evolve: Callable[[Gathered], Evolution]) -> Evolution:
        """The evolution of the rows; where clients resist all others in it, again without theirs."""
        evolution = evolve(rows)
        if self.trim:
            keep = without_outliers(evolution, rows.y, self.trim, None if self.shuffle else rows.senders)
            if rows.keep(keep, "trimmed_rows"):
                evolution = evolve(rows)
        return evolution

    def _stack(self, task: Task, w: Tensor, uploads: list[Message], round: int) -> Gathered:
        """Uploads are let go as they are read: a round's Jacobian is never there twice."""
        sent = torch.tensor([row_count(upload) for upload in uploads])
        fair = fair_counts(sent, ROW_LIMIT)
        stack: Stack | None = None
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        made_up, verified, asked = 0, self.verify, 0
        while uploads:
            rows, count, few = self.read_rows(task, uploads.pop(0)), int(sent[asked]), int(fair[asked])
            own = Gathered(*rows, torch.full((count,), asked, device=rows.outputs.device))
            asked += 1
            if verified is None:
                verified = verifiable(task, w, own.J)
            if count > few:
                own.keep(surplus_left_out(count, few, round), "surplus_rows")
            if verified:
                true = true_rows(task, w, own.J, own.f0).nonzero()[:, 0]
                made_up += len(own.y) - len(true)
                own.keep(true, "made_up_rows")
            if not len(own.y):
                continue
            if asked < len(sent) or stack:  # more rows may come, or came
                stack = stack or Stack(int(fair.sum()))
                stack.add(own.J)
            parts.append((own.f0, own.y, own.senders))
        if not parts:
            needs = "verify needs a network that begins with a linear layer"
            raise TooFew(f"none of {made_up} rows is what the network gives at the input it holds; {needs}")
        J = stack.whole() if stack else own.J
        f0, y, senders = (torch.cat(same) for same in zip(*parts, strict=True))
        return Gathered(J, f0, y, senders, bool(verified), _notes(int((sent - fair).sum()), made_up))


def product_budget(state: State) -> int | None:
    """Products with the kernel that this round may take; None where there is no round to go by."""
    return budget(state[COSTS])


def spent(state: State, evolution: Evolution) -> State:
    """The part of the next state that says what recent rounds took."""
    return {COSTS: with_cost(state[COSTS], evolution.statistics.evaluations)}


def _notes(surplus: int, made_up: int) -> dict[str, float | str]:
    counts = {"surplus_rows": surplus, "made_up_rows": made_up}
    return {name: count for name, count in counts.items() if count}
