"""The choice among candidate weights w(t_1) … w(t_S) by their losses on clients' own samples.

Candidates are points of one smooth path, so all of them travel in the bytes of one set of weights, as coordinates along
the few directions they span (`wire/span.py`). Clients judge these approximations; the server goes on with the exact
weights of the candidate they choose. So rounding never enters the weights: it can only move the choice, between
candidates whose losses differ by less than it changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError, NumericalError
from ntkfl.methods.replies import SAMPLES, Reply
from ntkfl.methods.robust import trimmed_mean
from ntkfl.methods.task import ClientRound, Task
from ntkfl.wire.message import Message
from ntkfl.wire.span import unpack_span

if TYPE_CHECKING:
    from ntkfl.methods.base import Method

OVERFLOW = 1e30  # the loss of a candidate that overflows: large, finite, a valid message
_OVERFLOWING_SUM = 1e300
_SUMS, _MEANS = "sums", "losses"


class CandidateLosses(Reply):
    """A client's losses of S candidates: their `sums` [S] over its samples and the number of `samples`.

    Through a shuffler one row of means instead, `losses` [1, S]. A row per sample could be matched to the upload it
    belongs to, a number of samples would tell clients apart, and either would let a client vote more than once.
    """

    kind = "rows"
    hidden = False  # whether a shuffler hides whose losses these are

    @classmethod
    def of(cls, task: Task, candidates: Tensor, client: ClientRound) -> Self:
        """The losses of candidates [S, d] on the client's samples: S forward passes, no data moved."""
        losses = task.candidate_losses(candidates, client.x, client.y)  # [S, n]
        if task.privacy.shuffle:
            means = losses.double().mean(1).nan_to_num(nan=OVERFLOW, posinf=OVERFLOW).clamp(max=OVERFLOW)
            return cls({_MEANS: means.to(losses.dtype).unsqueeze(0)})
        sums = losses.sum(1).double().nan_to_num(nan=_OVERFLOWING_SUM, posinf=_OVERFLOWING_SUM)
        return cls({_SUMS: sums, SAMPLES: torch.tensor(len(client), dtype=torch.int32)})

    @classmethod
    def blank(cls, method: Method, task: Task, question: Message) -> Self:
        candidates = len(unpack_span(question, task.like))
        if task.privacy.shuffle:
            return cls({_MEANS: task.like.new_zeros(1, candidates)})
        return cls({_SUMS: torch.zeros(candidates).double(), SAMPLES: torch.tensor(1, dtype=torch.int32)})

    def check(self, task: Task) -> None:
        """Refuses losses that no sample can have: negative ones would outvote every honest client."""
        self.hidden = task.privacy.shuffle
        losses, most = self._losses(), OVERFLOW if self.hidden else _OVERFLOWING_SUM
        if bool(((losses < 0) | (losses > 1.01 * most)).any()):
            raise MessageError(f"a loss below zero, or above {most:g}")
        if not 1 <= self.samples < 2**31:
            raise MessageError(f"losses of {self.samples} samples")

    @property
    def samples(self) -> int:
        """Samples that the losses are of; 1 where a shuffler hides it."""
        return 1 if self.hidden else int(self.take(SAMPLES, ()))

    def means(self) -> Tensor:
        """The client's mean loss of each candidate, float64 [S]."""
        return self._losses() / self.samples

    def _losses(self) -> Tensor:
        return (self.take(_MEANS, (1, None))[0] if self.hidden else self.take(_SUMS, (None,))).double()


def choose(replies: Sequence[CandidateLosses], trim: float) -> tuple[int, float]:
    """(the candidate to take, the cohort's mean loss there).

    Without `trim` the candidate of least mean loss over all samples: the paper's criterion, in which every client has a
    veto, as one that reports 1e30 for all candidates but one chooses that one. With `trim` every client has one vote,
    its *excess*: what a candidate costs it above its own best one. The least trimmed mean of these wins. Losses as such
    would not do: clients differ more in the level of their losses than in what they lose by a candidate, so that a few
    Byzantine clients below the level of all others could still name the winner (docs/audit.md).
    """
    means = torch.stack([reply.means() for reply in replies])  # [M, S]
    if not trim:
        samples = torch.tensor([reply.samples for reply in replies]).to(means)
        losses = (means * samples.unsqueeze(1)).sum(0) / samples.sum()
        best = argmin(losses)
        return best, float(losses[best])
    best = argmin(trimmed_mean(means - means.amin(1, keepdim=True), trim))
    return best, float(trimmed_mean(means[:, best], trim))


def validate(task: Task, candidates: Tensor) -> tuple[int, float]:
    """The same by held-out clients."""
    if task.validation is None:
        raise ConfigError("choosing t by validation needs held-out clients: hold some out (--set hold_out=10)")
    losses = task.candidate_losses(candidates, *task.validation).mean(1)
    best = argmin(losses)
    return best, float(losses[best])


def argmin(losses: Tensor) -> int:
    """The candidate of least loss; `NumericalError` where none has one."""
    best = int(losses.nan_to_num(nan=float("inf")).argmin())
    if not bool(losses[best].isfinite()):
        raise NumericalError("no candidate has a finite loss: the evolution left the range where the network works")
    return best
