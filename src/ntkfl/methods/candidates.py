"""The candidates of a round of NTK-FL: up to which times the weights evolve, how candidates travel, which one is taken.

Candidates w(t_1) … w(t_S) are points of one smooth path, so that all of them are sent in the bytes of one set of
weights, as coordinates along the few directions they span (`wire/span.py`). Clients judge these approximations; the
server goes on with the exact weights of the candidate they choose. So no rounding enters the weights or adds up over
rounds: it can only move the choice, between candidates whose losses differ by less than it changes them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import unknown
from ntkfl.methods.base import ClientRound, Outgoing, State, Task
from ntkfl.methods.robust_rows import RobustRows
from ntkfl.methods.step_selection import CHOICES, LOSS_ATTACKS, choose, score, validate
from ntkfl.tangent import Evolution
from ntkfl.wire import Message
from ntkfl.wire.span import pack_span, unpack_span

EXTEND = 16.0  # how far beyond the last of `steps` candidates may go, as a multiple of it
EXTENDED = "extended_steps"  # in the server's state: candidates beyond the last of `steps`
_SHORT = 0.8  # residual left, on average over a flow, above which it has hardly begun


class Candidates(RobustRows):
    """`times`, `select` and `extended` are the places of a round at which there are candidates."""

    steps: tuple[float, ...] | None = Field(
        None, description="candidate numbers of steps t; default: geometric in η·t up to 40; the paper: 100, 200 … 2000"
    )
    choose: str = Field("cohort", description="t by the cohort's own losses, or by a validation set (held-out clients)")

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.choose not in CHOICES:
            raise unknown("choice of t", self.choose, CHOICES)

    @property
    @abstractmethod
    def grows(self) -> bool:
        """Whether a candidate twice as long is added after each round whose longest wins and is still short."""

    def times(self, state: State) -> tuple[float, ...]:
        """t_1 … t_S of this round: `steps`, and as many doublings of the last as earlier rounds added."""
        assert self.steps is not None
        added = int(state[EXTENDED]) if EXTENDED in state else 0
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
        """A record's warning where longer candidates are asked for and none may be added."""
        if self._may_grow(state) or not self._short(state, evolution, best):
            return {}
        chosen = (
            f"the longest candidate, t = {evolution.steps[best]:g}, was chosen, and training has hardly begun by then"
        )
        return {"warning": f"{chosen}: give longer steps, or none, which grow by themselves"}

    def _short(self, state: State, evolution: Evolution, best: int) -> bool:
        """Whether the longest candidate won and the flow has hardly begun by then."""
        return bool(evolution.steps[best] == self.times(state)[-1] and residual_left(evolution) > _SHORT)

    def _may_grow(self, state: State) -> bool:
        assert self.steps is not None
        return self.grows and 2 * self.times(state)[-1] <= EXTEND * self.steps[-1]

    def select(
        self, task: Task, candidates: Tensor, round: int
    ) -> Generator[Outgoing, list[Message], tuple[int, float]]:
        """(which of the candidates [S, d] to take, its mean loss), as the cohort or a validation set finds."""
        if self.choose == "validation":
            return validate(task, candidates)
        replies = yield Message("candidates", round, self.packed(candidates))
        return choose(replies, len(candidates), self.shuffle, self.trim_losses)

    def packed(self, candidates: Tensor) -> dict[str, Tensor]:
        """Arrays of the message that asks about the candidates [S, d]."""
        return pack_span(candidates)

    def unpacked(self, message: Message, like: Tensor) -> Tensor:
        """The candidates [S, d] of such a message, d as `like` [d] has it."""
        return unpack_span(message, like)

    def judge(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        """Each client's losses of the candidates in the server's message."""
        candidates = self.unpacked(message, task.like)
        return [score(task, message.round, candidates, client, self.shuffle) for client in clients]

    @property
    def attacks(self) -> frozenset[str]:
        return super().attacks | (LOSS_ATTACKS if self.choose == "cohort" else frozenset())


def residual_left(evolution: Evolution) -> float:
    """The mean residual of the whole flow in units of the first candidate's, ‖R(t_S)/t_S‖ / ‖R(t_1)/t_1‖: 1 where
    hardly anything has been learned by t_S, towards 0 where most of t_S was spent on what was learned before.
    """
    first, last = (evolution.residuals[i].norm() / evolution.steps[i] for i in (0, -1))
    return float(last / first) if first > 0 else 0.0
