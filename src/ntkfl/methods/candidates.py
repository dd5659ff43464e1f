"""The candidates of a round of NTK-FL: up to which times the weights evolve, how candidates travel, which one is taken.

Candidates w(t_1) … w(t_S) are points of one smooth path, so that all of them are sent in the bytes of one set of
weights, as coordinates along the few directions they span (`wire/span.py`). Clients judge these approximations; the
server goes on with the exact weights of the candidate they choose. So no rounding enters the weights or adds up over
rounds: it can only move the choice, between candidates whose losses differ by less than it changes them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError, unknown
from ntkfl.methods.additive import Summand, losses_summand, mean_losses
from ntkfl.methods.base import ClientRound, Outgoing, State, Task
from ntkfl.methods.robust_rows import RobustRows
from ntkfl.methods.step_selection import CHOICES, LOSS_ATTACKS, choose, score, validate
from ntkfl.tangent import Evolution
from ntkfl.wire import Message
from ntkfl.wire.span import FINE, pack_span, unpack_span

CANDIDATE_CODECS = ("span", "exact")
EXTENDED = "extended_steps"  # in the server's state: candidates beyond the last of `steps`
_SHORT = 0.8  # residual left, on average over a flow, above which it has hardly begun
WHOLE = "weights"  # in a message: candidates one by one


class Candidates(RobustRows):
    """`times`, `select` and `extended` are the places of a round at which there are candidates."""

    steps: tuple[float, ...] | None = Field(
        None, description="candidate numbers of steps t; default: geometric in η·t up to 40; the paper: 100, 200 … 2000"
    )
    extend: float = Field(
        16.0,
        ge=1,
        description="how far beyond the last of `steps` candidates may go, as a multiple of it: one twice as long is "
        "added after each round whose longest wins and is still short; by default 1, not at all, where steps are given "
        "or with the paper's trace kernel",
    )
    choose: str = Field("cohort", description="t by the cohort's own losses, or by a validation set (held-out clients)")
    candidate_codec: str = Field(
        "span", description="how candidates travel: span (along the few directions they span) or exact (each whole)"
    )

    sum_losses: bool = Field(
        False, description="shuffled: candidates' losses as a secure sum, of which nobody's can be left out"
    )

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.sum_losses and not (self.shuffle and self.choose == "cohort"):
            raise ConfigError("sum_losses is of a cohort behind a shuffler: it needs shuffle and choose = 'cohort'")
        if self.sum_losses and self.trim_losses:
            raise ConfigError("trim_losses compares clients' losses, of which sum_losses shows none: use one of them")
        if self.choose not in CHOICES:
            raise unknown("choice of t", self.choose, CHOICES)
        if self.candidate_codec not in CANDIDATE_CODECS:
            raise unknown("candidate codec", self.candidate_codec, CANDIDATE_CODECS)

    def times(self, state: State) -> tuple[float, ...]:
        """t_1 … t_S of this round: `steps`, and as many doublings of the last as earlier rounds added."""
        assert self.steps is not None
        added = int(state[EXTENDED]) if EXTENDED in state else 0  # a checkpoint of an earlier version has none
        return (*self.steps, *(self.steps[-1] * 2.0**k for k in range(1, added + 1)))

    def extended(self, state: State, evolution: Evolution, best: int) -> State:
        """The part of the next state that says how long candidates are: longer, where the longest asked for won and the
        flow has hardly begun by then. A cohort takes the longest also where it is long already, as it fits its own
        samples ever better: longer ones then cost time, and accuracy where weights are not averaged.
        """
        added = len(self.times(state)) - len(self.steps or ())
        added += self._short(state, evolution, best) and self._may_grow(state)
        return {EXTENDED: torch.tensor(added)} if added else {}

    def too_short(self, state: State, evolution: Evolution, best: int) -> dict[str, float | str]:
        """A record's warning where longer candidates are asked for and `extend` allows none."""
        if self._may_grow(state) or not self._short(state, evolution, best):
            return {}
        chosen = (
            f"the longest candidate, t = {evolution.steps[best]:g}, was chosen, and training has hardly begun by then"
        )
        return {"warning": f"{chosen}: give longer steps, or let them grow (--set extend=16)"}

    def _short(self, state: State, evolution: Evolution, best: int) -> bool:
        """Whether the longest candidate won and the flow has hardly begun by then."""
        return bool(evolution.steps[best] == self.times(state)[-1] and residual_left(evolution) > _SHORT)

    def _may_grow(self, state: State) -> bool:
        assert self.steps is not None
        return 2 * self.times(state)[-1] <= self.extend * self.steps[-1]

    def select(
        self, task: Task, candidates: Tensor, round: int
    ) -> Generator[Outgoing, list[Message], tuple[int, float]]:
        """(which of the candidates [S, d] to take, its mean loss), as the cohort or a validation set finds."""
        if self.choose == "validation":
            return validate(task, candidates)
        packed = pack_span(candidates) if self.candidate_codec == "span" else {WHOLE: candidates}
        replies = yield Message("candidates", round, packed)
        return choose(replies, len(candidates), self.shuffle, self.trim_losses)

    def judge(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        """Each client's losses of the candidates in the server's message."""
        candidates = take_candidates(message, task.like)
        return [score(task, message.round, candidates, client, self.shuffle) for client in clients]

    def summed(self, question: str) -> bool:
        return self.sum_losses and question == "candidates"

    def summand(self, task: Task, message: Message, reply: Message) -> Summand:
        return losses_summand(reply)

    def from_total(self, task: Task, message: Message, total: Mapping[str, Tensor], clients: int) -> Message:
        return mean_losses(message, total, clients, task.like)

    @property
    def attacks(self) -> frozenset[str]:
        return super().attacks | (LOSS_ATTACKS if self.choose == "cohort" else frozenset())


def residual_left(evolution: Evolution) -> float:
    """The mean residual of the whole flow in units of the first candidate's, ‖R(t_S)/t_S‖ / ‖R(t_1)/t_1‖: 1 where
    hardly anything has been learned by t_S, towards 0 where most of t_S was spent on what was learned before.
    """
    first, last = (evolution.residuals[i].norm() / evolution.steps[i] for i in (0, -1))
    return float(last / first) if first > 0 else 0.0


def take_candidates(message: Message, like: Tensor) -> Tensor:
    """The candidates [S, d] of a server's message, in either form; S is at least 1."""
    if FINE in message.arrays:
        return unpack_span(message, like)
    candidates = message.take(WHOLE, (None, like.numel()), like)
    if not len(candidates):
        raise MessageError("the server asks which candidate is best, and sends none")
    return candidates
