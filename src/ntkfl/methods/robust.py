"""Robust forms of what a server combines: clients' updates, rows of Jacobians, candidates' losses.

Each bounds what a minority of Byzantine clients can do; none can tell one from an honest client whose data are unlike
all others', so each also costs something. What they do against which attack, with figures: docs/robustness.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ntkfl.errors import ConfigError, NTKFLError
from ntkfl.methods.base import Task
from ntkfl.tangent import Evolution, Jacobian
from ntkfl.tangent.factored import LinearBlock
from ntkfl.tangent.jacobian import BlockJacobian

COMBINATIONS = ("mean", "clip", "median", "trimmed")
# How many times the median a client's resistance may be. Honest clients stay below, unless one has a class that nobody
# else has. The second bound is for single rows, where senders are not known.
STANDS_OUT, ROW_STANDS_OUT = 2.0, 1.4
_MAJORITY = 3  # clients of whom two can outvote one: of fewer, nobody's numbers are any measure for the others'
_MOST_LABELS = 32  # above which rows are not compared with those of their label, at a kernel product each
_RECENT = 5  # rounds that a budget looks back on
_DEARER = 5  # times the median of them that a round may cost


# Updates, one vector per client.


def combine(how: str, updates: Iterable[Tensor], trim: float) -> Tensor:
    """One vector [d] of clients' updates [d], none counted for more than another.

    `median`: of each coordinate. `trimmed`: the mean of each coordinate without its ⌊trim·M⌋ largest and smallest.
    """
    stacked = torch.stack(list(updates))
    return median(stacked) if how == "median" else trimmed_mean(stacked, trim)


def clip_factors(lengths: Tensor, most: float) -> Tensor:
    """What scales updates of these lengths [M] down to `most` times the median length, where they are longer: [M]."""
    if len(lengths) < _MAJORITY:
        return torch.ones_like(lengths)
    return (most * median(lengths) / lengths.clamp_min(1e-30)).clamp(max=1)


def fair_counts(counts: Tensor, most: float) -> Tensor:
    """Numbers of samples, or rows, [M], of each client at most `most` times the median client's, and one at least."""
    if len(counts) < _MAJORITY:
        return counts
    return counts.clamp(max=(most * median(counts.double())).clamp_min(1).floor().to(counts))


def median(values: Tensor) -> Tensor:
    """The median along the first dimension; of an even number the mean of both in the middle."""
    ordered = values.sort(dim=0).values
    n = len(values)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def trimmed_mean(values: Tensor, trim: float) -> Tensor:
    """The mean along the first dimension [n, ...] without the ⌊trim·n⌋ largest and as many smallest."""
    n = len(values)
    cut = min(int(trim * n), (n - 1) // 2)
    return values.sort(dim=0).values[cut : n - cut].mean(0)


# Rows of Jacobians.


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


def without_outliers(evolution: Evolution, y: Tensor, trim: float, senders: Tensor | None) -> Tensor:
    """Indices of the rows to keep: without those of clients, by `senders` [N], that resist far more than the median
    client, for no more than ⌊trim·M⌋ of them. Where nobody knows whose rows are whose, every row stands for itself.

    Rows of a label y [N] that nobody else has stay: no other row tells whether they are wrong, and without them the
    model would lose the label. The client's other rows go, so that one made-up label does not save them.
    """
    resistance, bound = _resistance(evolution).cpu(), STANDS_OUT  # few numbers: a GPU would be waited for many times
    if senders is None:
        senders, bound = torch.arange(len(resistance)), ROW_STANDS_OUT
    clients, of = torch.unique(senders.cpu(), return_inverse=True)
    sums = resistance.new_zeros(len(clients)).index_add_(0, of, resistance)
    means = sums / torch.bincount(of)
    order = means.argsort(descending=True, stable=True)[: int(trim * len(clients))]
    contrary = order[means[order] > bound * median(means)]
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


def verifiable(task: Task, weights: Tensor, J: Jacobian) -> bool:
    """Whether rows of this form hold the inputs: the network begins with a linear layer that gets them as they are."""
    block = J.blocks[0] if isinstance(J, BlockJacobian) else None
    if not isinstance(block, LinearBlock) or block.T != 1:
        return False
    known = _begins_linear.setdefault(task, set())
    if block.n_in not in known and _gets_inputs(task, weights, block.n_in):
        known.add(block.n_in)
    return block.n_in in known


_begins_linear: WeakKeyDictionary[Task, set[int]] = WeakKeyDictionary()  # by inputs of the first layer, as it was found


def _gets_inputs(task: Task, weights: Tensor, n: int) -> bool:
    """Whether the network's first linear layer gets inputs [n] as they are: asked of one made up for it."""
    z = torch.linspace(-1, 1, n, device=weights.device, dtype=weights.dtype).unsqueeze(0)
    try:
        again = task.jacobian(weights, z)
    except (RuntimeError, NTKFLError):
        return False
    first = again.blocks[0] if isinstance(again, BlockJacobian) else None
    return isinstance(first, LinearBlock) and first.T == 1 and torch.equal(first.a[:, 0], z)


def true_rows(task: Task, weights: Tensor, J: Jacobian, f0: Tensor) -> Tensor:
    """Which rows [N] of a factored upload are what the network gives at the input they hold: all else was made up.

    The first layer's factor is the (projected) input itself; from it the server computes outputs and Jacobian again.
    """
    nothing = torch.zeros(len(J), dtype=torch.bool, device=f0.device)
    block = J.blocks[0] if isinstance(J, BlockJacobian) else None
    if not isinstance(J, BlockJacobian) or not isinstance(block, LinearBlock) or block.T != 1:
        return nothing
    z = block.a[:, 0]
    try:
        again, outputs = task.jacobian(weights, z), task.predict(weights, z)
    except RuntimeError:
        raise ConfigError("verify needs a network whose first linear layer gets the inputs themselves") from None
    if not isinstance(again, BlockJacobian) or again.layout != J.layout:
        return nothing
    true = _alike(f0, outputs)
    for mine, theirs in zip(again.tensors(), J.tensors(), strict=True):
        true &= _alike(theirs, mine)
    return true


def _alike(came: Tensor, made: Tensor) -> Tensor:
    """Rows that differ by no more than another machine's rounding."""
    difference = (came - made).flatten(1).abs().amax(1)
    return difference <= 1e-3 * (1e-3 + made.flatten(1).abs().amax(1))


# What a round may cost.


def no_costs() -> Tensor:
    """The costs of the last rounds, int64 [5], before the first: zeros stand for rounds that were not."""
    return torch.zeros(_RECENT, dtype=torch.int64)


def budget(costs: Tensor) -> int | None:
    """Products with the kernel that a round may take, by those of the last rounds: without any, None.

    A row within the bound of extreme ones can still make a round ten times as dear.
    """
    met = [cost for cost in costs.tolist() if cost > 0]
    return math.ceil(_DEARER * statistics.median(met)) if met else None


def with_cost(costs: Tensor, latest: int) -> Tensor:
    """The costs with the latest round's."""
    return torch.cat([costs[1:], costs.new_tensor([latest])])
