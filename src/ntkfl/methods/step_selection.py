"""The choice of t: candidates' losses as clients report them, and what the server makes of the reports."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError, NumericalError
from ntkfl.methods.base import ClientRound, Task
from ntkfl.methods.robust import trimmed_mean
from ntkfl.wire import Message

CHOICES = ("cohort", "validation")
LOSS_ATTACKS = frozenset({"false-losses", "shortest-flow", "longest-flow"})
OVERFLOW = 1e30  # the loss of a candidate that overflows
_OVERFLOWING_SUM = 1e300


def score(task: Task, round: int, candidates: Tensor, client: ClientRound, shuffled: bool) -> Message:
    """A client's reply on the candidates [S, d], the paper's criterion with no data moved: the sums of its losses [S]
    and its number of samples.

    `shuffled`, one row of means [1, S]: a row a sample could be matched to the upload it belongs to, a number of
    samples would tell clients apart, and either would let a client vote more than once.

    A candidate may overflow; a large finite number says so and stays a valid message.
    """
    losses = task.candidate_losses(candidates, client.x, client.y)  # [S, n]
    if shuffled:
        means = losses.double().mean(1).nan_to_num(nan=OVERFLOW, posinf=OVERFLOW).clamp(max=OVERFLOW)
        return Message("losses", round, {"losses": means.to(losses.dtype).unsqueeze(0)})
    sums = losses.sum(1).double().nan_to_num(nan=_OVERFLOWING_SUM, posinf=_OVERFLOWING_SUM)
    return Message("losses", round, {"sums": sums, "samples": torch.tensor(len(client), dtype=torch.int32)})


def check_scores(reply: Message, shuffled: bool) -> None:
    """`MessageError` for losses that no sample can have."""
    losses = reply.of_kind("losses").take("losses" if shuffled else "sums", (None, None) if shuffled else (None,))
    most = OVERFLOW if shuffled else _OVERFLOWING_SUM
    if bool(((losses < 0) | (losses > 1.01 * most)).any()):
        raise MessageError(f"a loss below zero, or above {most:g}")
    if not shuffled:
        _samples(reply)


def choose(replies: Sequence[Message], candidates: int, shuffled: bool, trim: float) -> tuple[int, float]:
    """(the candidate to take, the cohort's mean loss there).

    Without `trim` the candidate of least mean loss over all samples: the paper's criterion, in which every client has a
    veto, as one that reports 1e30 for all candidates but one chooses that one. With `trim` every client has one vote,
    its *excess*: what a candidate costs it above its own best one. The least trimmed mean of these wins. Losses as such
    would not do: clients differ more in the level of their losses than in what they lose by a candidate, so that a few
    Byzantine clients below the level of all others could still name the winner (docs/robustness.md).
    """
    means, samples = _reports(replies, candidates, shuffled)
    if not trim:
        losses = (means * samples.unsqueeze(1)).sum(0) / samples.sum()
        best = argmin(losses)
        return best, float(losses[best])
    best = argmin(trimmed_mean(means - means.amin(1, keepdim=True), trim))
    return best, float(trimmed_mean(means[:, best], trim))


def _reports(replies: Sequence[Message], candidates: int, shuffled: bool) -> tuple[Tensor, Tensor]:
    """Each client's mean losses, [M, S], and its number of samples [M]: ones, where a shuffler hides them."""
    if shuffled:
        means = torch.cat([r.of_kind("losses").take("losses", (None, candidates)) for r in replies]).double()
        return means, torch.ones(len(means)).to(means)
    sums = torch.stack([r.of_kind("losses").take("sums", (candidates,)) for r in replies])
    samples = torch.tensor([_samples(r) for r in replies]).to(sums)
    return sums / samples.unsqueeze(1), samples


def _samples(reply: Message) -> int:
    """The number of samples that a client's losses are of: a number may have come as any type, and be of any size."""
    samples = int(reply.take("samples", ()))
    if not 1 <= samples < 2**31:
        raise MessageError(f"losses of {samples} samples")
    return samples


def validate(task: Task, candidates: Tensor) -> tuple[int, float]:
    """The same by held-out clients."""
    if task.validation is None:
        raise ConfigError("choosing t by validation needs held-out clients: hold some out (--set hold_out=10)")
    x, y = task.validation
    losses = task.candidate_losses(candidates, x, y).mean(1)
    best = argmin(losses)
    return best, float(losses[best])


def favouring(attack: str, losses: Tensor) -> Tensor:
    """What a Byzantine client reports in place of losses [..., S]: none for one candidate (the worst, the first or the
    last, by the kind of attack), and for the others one that overflowed.
    """
    worst = int(losses.reshape(-1, losses.shape[-1]).sum(0).argmax())
    false = torch.full_like(losses, OVERFLOW)
    false[..., {"shortest-flow": 0, "longest-flow": -1}.get(attack, worst)] = 0
    return false


def argmin(losses: Tensor) -> int:
    """The candidate of least loss; `NumericalError` where none has one."""
    best = int(losses.nan_to_num(nan=float("inf")).argmin())
    if not bool(losses[best].isfinite()):
        raise NumericalError("no candidate has a finite loss: the evolution left the range where the network works")
    return best
