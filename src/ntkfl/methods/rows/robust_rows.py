"""Bounds on what a minority of Byzantine clients does to a round of NTK-FL, from its rows to its cost (`[robust]`).

No client's rows far outnumber the others', none were made up where that can be told, none is far longer than the others
or pulls against those of its label, and clients that resist all others are left out. None of it is in the paper, and
all of it is off by default. What each does against which attack: docs/audit.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ntkfl.errors import NTKFLError, TooFew
from ntkfl.methods.robust import fair_counts, median
from ntkfl.methods.rows.upload import TangentRows
from ntkfl.methods.task import Task
from ntkfl.tangent import Evolution, Jacobian, concatenate
from ntkfl.tangent.factored import LinearBlock
from ntkfl.tangent.jacobian import BlockJacobian

ROW_LIMIT = 1.5  # with row_clip: rows of one client that count, at most, in units of the median client's
# How many times the median a client's resistance may be. Honest clients stay below, unless one has a class that nobody
# else has.
STANDS_OUT = 2.0
_MOST_LABELS = 32  # above which rows are not compared with those of their label, at a kernel product each
_RECENT = 5  # rounds that a budget looks back on
_DEARER = 5  # times the median of them that a round may cost


@dataclass
class Gathered:
    """All rows of a round: J, outputs f0 [N, d2], labels y, the reply each row is from [N], whether the server computed
    them again, and how many were left out and why.
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


def gather(task: Task, w: Tensor, uploads: list[TangentRows], round: int, form: str = "auto") -> Gathered:
    """All rows of the round, as the bounds of `[robust]` leave them. The list is emptied as it is read."""
    robust = task.robust
    rows = _stacked(task, w, uploads, round, robust.verify and holds_inputs(task, w, form))
    if robust.row_clip:
        rows.J, clipped = clip_rows(rows.J, robust.row_clip)
        rows.notes |= {"clipped_rows": clipped} if clipped else {}
    if robust.drop_opposed and not rows.verified and not rows.y.is_floating_point():
        rows.keep((~opposed(rows.J, rows.y)).nonzero()[:, 0], "opposed_rows")
    return rows


def _stacked(task: Task, w: Tensor, uploads: list[TangentRows], round: int, verify: bool) -> Gathered:
    """The rows of all uploads, without a client's surplus and without those that the network does not give."""
    sent = torch.tensor([len(upload.J) for upload in uploads])
    counted = fair_counts(sent, ROW_LIMIT) if task.robust.row_clip else sent
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    jacobians: list[Jacobian] = []
    made_up = 0
    for sender, (n, most) in enumerate(zip(sent.tolist(), counted.tolist(), strict=True)):
        upload, device = uploads.pop(0), w.device
        own = Gathered(
            upload.J.to(device),
            upload.outputs.to(device),
            upload.labels.to(device),
            torch.full((n,), sender).to(device),
        )
        if n > most:
            own.keep(surplus_left_out(n, most, round), "surplus_rows")
        if verify:
            true = true_rows(task, w, own.J, own.f0).nonzero()[:, 0]
            made_up += len(own.y) - len(true)
            own.keep(true, "made_up_rows")
        if len(own.y):
            jacobians.append(own.J)
            parts.append((own.f0, own.y, own.senders))
    if not parts:
        raise TooFew(f"none of {made_up} rows is what the network gives at the input it holds")
    f0, y, senders = (torch.cat(same) for same in zip(*parts, strict=True))
    counts = {"surplus_rows": int((sent - counted).sum()), "made_up_rows": made_up}
    notes: dict[str, float | str] = {name: count for name, count in counts.items() if count}
    return Gathered(concatenate(jacobians), f0, y, senders, verify, notes)


def agreeing(task: Task, rows: Gathered, evolve: Callable[[Gathered], Evolution]) -> Evolution:
    """The evolution of the rows; where clients resist all others in it (`trim`), again without theirs."""
    evolution = evolve(rows)
    if task.robust.trim and not task.privacy.shuffle:
        keep = without_outliers(evolution, rows.y, task.robust.trim, rows.senders)
        if rows.keep(keep, "trimmed_rows"):
            evolution = evolve(rows)
    return evolution


# Each bound by itself.


def clip_rows(J: Jacobian, most: float) -> tuple[Jacobian, int]:
    """J with every row scaled down to `most` times the median row's norm where it is longer, and how many were."""
    norms = J.norms()
    factors = (most * median(norms) / norms.clamp_min(1e-300)).clamp(max=1)
    clipped = int((factors < 1).sum())
    return (J.scaled(factors), clipped) if clipped else (J, 0)


def surplus_left_out(count: int, most: int, round: int) -> Tensor:
    """`most` of a client's `count` rows, ascending, drawn by the server: by the number of the round alone, so that
    every server that repeats the round leaves out the same ones.
    """
    draws = torch.Generator().manual_seed(round)
    return torch.randperm(count, generator=draws)[:most].sort().values


def without_outliers(evolution: Evolution, y: Tensor, trim: float, senders: Tensor) -> Tensor:
    """Indices of the rows to keep: without those of clients, by `senders` [N], that resist far more than the median
    client, for no more than ⌊trim·M⌋ of them.

    Rows of a label y [N] that nobody else has stay: no other row tells whether they are wrong, and without them the
    model would lose the label. The client's other rows go, so that one made-up label does not save them.
    """
    resistance = _resistance(evolution).cpu()  # few numbers: a GPU would be waited for many times
    clients, of = torch.unique(senders.cpu(), return_inverse=True)
    sums = resistance.new_zeros(len(clients)).index_add_(0, of, resistance)
    means = sums / torch.bincount(of)
    order = means.argsort(descending=True, stable=True)[: int(trim * len(clients))]
    contrary = order[means[order] > STANDS_OUT * median(means)]
    if not len(contrary):
        return torch.arange(len(of))
    out = torch.isin(of, contrary)
    if not y.is_floating_point():
        y = y.cpu()
        out &= torch.isin(y, y[~out])
    return (~out).nonzero()[:, 0]


def _resistance(evolution: Evolution) -> Tensor:
    """‖R_i(t)‖/t, the residual of row i averaged over the flow up to t, averaged over the candidates t: [N].

    Small for a row that the others help to fit, large for one that pulls against them: a wrong label, or a Jacobian
    with its sign turned. Short times say what the model thought before the round, long ones what the cohort thinks.
    """
    times = torch.tensor(evolution.steps, device=evolution.residuals.device)
    averages: Tensor = evolution.residuals.norm(dim=2) / times.unsqueeze(1)
    return averages.mean(0)


def opposed(J: Jacobian, y: Tensor) -> Tensor:
    """Rows [N] that move the others of their label y the wrong way: ⟨J_iᵀ v, Σ_j J_jᵀ v⟩ < 0 over the rows j of that
    label, v = e_y − 1/d2 being the direction that raises its output above the others'. A Jacobian with its sign turned
    does, whatever its length.

    One kernel product a label. None where labels are more than 32, or where a third of all rows would be left out: then
    it is not a few that lie, or the network is not one whose rows of one label agree.
    """
    outputs, labels = J.shape[1], torch.unique(y)
    against = torch.zeros_like(y, dtype=torch.bool)
    if len(labels) > _MOST_LABELS:
        return against
    for label in labels.tolist():
        own = y == label
        v = torch.full((outputs,), -1 / outputs, device=y.device, dtype=J.dtype)
        v[label] += 1
        against |= own & (J.product(own.unsqueeze(1) * v) @ v < 0)
    return against if 3 * int(against.sum()) < len(y) else torch.zeros_like(against)


def holds_inputs(task: Task, weights: Tensor, form: str = "auto") -> bool:
    """Whether rows hold the inputs, so that the server can compute them again: the network begins with a linear layer
    that gets them as they are. The network and the run's settings decide, and nothing that a client sent.
    """
    if task.privacy.sparsity or task.example is None:
        return False
    x = torch.linspace(-1, 1, task.example[0].numel()).view_as(task.example[0]).to(weights)
    z = _inputs(task.jacobian(weights, x, form)) if task.example[0].is_floating_point() else None
    return z is not None and torch.equal(z, x.flatten(1))


def _inputs(J: Jacobian) -> Tensor | None:
    """The inputs [N, n] of a first linear layer, as a factored Jacobian has them; None where it has none."""
    block = J.blocks[0] if isinstance(J, BlockJacobian) else None
    return block.a[:, 0] if isinstance(block, LinearBlock) and block.positions == 1 else None


def true_rows(task: Task, weights: Tensor, J: Jacobian, f0: Tensor) -> Tensor:
    """Which rows [N] of a factored upload are what the network gives at the input they hold: all else was made up.

    The first layer's factor is the (projected) input itself; from it the server computes outputs and Jacobian again.
    """
    true, z = torch.zeros(len(J), dtype=torch.bool, device=f0.device), _inputs(J)
    if z is None or task.example is None or z[0].numel() != task.example[0].numel():
        return true
    x = z.reshape(-1, *task.example[0].shape[1:])
    try:
        again, outputs = task.jacobian(weights, x), task.predict(weights, x)
    except (RuntimeError, NTKFLError):
        return true
    if not isinstance(J, BlockJacobian) or not isinstance(again, BlockJacobian) or again.layout != J.layout:
        return true
    true = _alike(f0, outputs)
    for mine, theirs in zip(again.tensors(), J.tensors(), strict=True):
        true &= _alike(theirs, mine)
    return true


def _alike(came: Tensor, made: Tensor) -> Tensor:
    """Rows that differ by no more than another machine's rounding."""
    difference = (came - made).flatten(1).abs().amax(1)
    return difference <= 1e-3 * (1e-3 + made.flatten(1).abs().amax(1))


# What a round may cost: a row within the bound of extreme ones can still make it ten times as dear.


def no_costs() -> Tensor:
    """The costs of the last rounds, int64 [5], before the first: zeros stand for rounds that were not."""
    return torch.zeros(_RECENT, dtype=torch.int64)


def budget(costs: Tensor) -> int | None:
    """Products with the kernel that a round may take, by those of the last rounds: without any, None."""
    met = [cost for cost in costs.tolist() if cost > 0]
    return math.ceil(_DEARER * statistics.median(met)) if met else None


def with_cost(costs: Tensor, latest: int) -> Tensor:
    """The costs with the latest round's."""
    return torch.cat([costs[1:], costs.new_tensor([latest])])
