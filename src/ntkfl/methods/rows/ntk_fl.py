"""NTK-FL. Yue et al., Neural Tangent Kernel Empowered Federated Learning, ICML 2022.

Clients send per-sample Jacobians, outputs and labels; the server evolves the weights along the tangent kernel to a
grid of times and keeps the time at which the cohort's own loss is least.

`NTKFL.round` is the paper's box. Beside it: what clients send (`upload.py`), how they choose among candidates
(`candidates.py`), and what bounds the harm that Byzantine clients do, off by default (`robust_rows.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError
from ntkfl.methods.base import Method, Outcome, Outgoing, Replies, Round
from ntkfl.methods.replies import Reply
from ntkfl.methods.rows.candidates import CandidateLosses, choose, validate
from ntkfl.methods.rows.robust_rows import Gathered, agreeing, budget, gather, holds_inputs, no_costs, with_cost
from ntkfl.methods.rows.upload import TangentRows
from ntkfl.methods.task import ClientRound, State, Task, check_finite
from ntkfl.tangent import Evolution, evolve, geometric_steps
from ntkfl.wire.message import Message
from ntkfl.wire.span import pack_span, unpack_span

_RARE = 1e-3  # added to a class's share: a class that is missing is not infinitely rare
_DOUBLINGS = 4  # of the longest candidate, at most
_SHORT = 0.8  # residual left, on average over a flow, above which it has hardly begun
_COSTS, _EXTENDED = "products", "extended_steps"  # in the server's state


class NTKFL(Method):
    """w^(k,t) = w^(k) + (η/N) Jᵀ R(t): J has a row for each of the cohort's N samples, and R(t) are their residuals
    accumulated along the kernel up to t. w^(k+1) is the w^(k,t) of least loss over the cohort.

    The defaults are the full kernel, smoothed labels and averaged weights. The paper's own settings are
    `NTKFL(kernel="trace", scheme="paper", steps=range(100, 2001, 100), label_smoothing=0, average=0)`.
    """

    name: ClassVar[str] = "ntk-fl"
    paper: ClassVar[str] = "Yue et al. 2022"
    replies: ClassVar[Mapping[str, type[Reply]]] = {"weights": TangentRows, "candidates": CandidateLosses}
    tolerance: ClassVar[float] = 1e-3  # relative error of each step of the flow's integration
    prior: ClassVar[float] = 0.0  # τ: outputs train with τ log(the round's share of each class) added to them

    average: float = Field(0.9, ge=0, lt=1, description="running average of the rounds' weights; 0 is the paper")
    label_smoothing: float = Field(
        0.1, ge=0, lt=1, description="part of a class label spread over all classes; 0 is the paper"
    )
    lr: float = Field(0.01, gt=0, description="η; with the flow only η·t counts")
    kernel: Literal["full", "trace"] = Field("full", description="full (the linearised network) or trace (the paper's)")
    scheme: Literal["flow", "descent", "paper"] = Field("flow", description="how residuals add up along the kernel")
    steps: tuple[float, ...] | None = Field(
        None, description="candidate numbers of steps t; default: geometric in η·t up to 40; the paper: 100, 200 … 2000"
    )
    choose: Literal["cohort", "validation"] = Field(
        "cohort", description="t by the cohort's own losses, or by a validation set (held-out clients)"
    )
    form: Literal["auto", "factored", "dense"] = Field("auto", description="form of a Jacobian, as made and as sent")

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.scheme != "flow" and self.steps is None:
            raise ConfigError(f"scheme {self.scheme!r} takes whole steps: give them, for example 100, 200 … 2000")

    def start(self, task: Task, weights: Tensor) -> State:
        """Notes what settings do nothing here, so that nobody relies on them. The state keeps what recent rounds cost,
        and by how many doublings candidates have become longer.
        """
        if self.steps is None and self.lr != type(self).model_fields["lr"].default:
            task.notes.append(
                f"lr = {self.lr:g} changes nothing: with the flow η·t alone counts, and by default t goes with 1/η; "
                "give steps to train for shorter or longer in a round"
            )
        if task.robust.verify and not holds_inputs(task, weights, self.form):
            task.notes.append("robust verify does nothing here: no factor of these Jacobians is the input itself")
        if task.robust.trim and task.privacy.shuffle:
            task.notes.append("robust trim does nothing here: a shuffler hides which rows are one client's")
        return super().start(task, weights) | {_COSTS: no_costs()}

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """The paper's box: broadcast w, stack the clients' rows, evolve to every t, let the cohort choose one.

        Cost: a Jacobian of N rows in memory (factored: inputs and sensitivities of each layer), some 50 to 100 kernel
        products for the evolution, S candidate weights [S, d]. Downlink: w, and all candidates in the bytes of one w.
        """
        w, times = state["weights"], self.times(state)
        most_products = budget(state[_COSTS]) if task.robust.row_clip else None

        uploads = yield Message("weights", round, {"weights": w})
        rows = gather(task, w, uploads, round, self.form)  # J, f0 and y of all clients' samples
        evolution = agreeing(task, rows, lambda rows: self.evolve(task, rows, times, most_products))  # to every t
        candidates = w + evolution.deltas()  # w^(k,t_1) … w^(k,t_S)
        best, loss = yield from self.select(task, candidates, round)
        new = check_finite(candidates[best].clone(), "the chosen model")

        extended, warning = self.extended(state, evolution, best)
        costs = with_cost(state[_COSTS], evolution.statistics.evaluations)
        notes = {"longest_steps": evolution.steps[-1]} | rows.diagnostics(evolution) | warning
        return Outcome({"weights": new, _COSTS: costs} | extended, loss, evolution.steps[best], notes)

    def answer(self, task: Task, question: Message, client: ClientRound) -> Reply:
        """To weights, the rows of all of the client's samples; to candidates, its losses under each of them."""
        if question.kind == "candidates":
            return CandidateLosses.of(task, unpack_span(question, task.like), client)
        w = question.of_kind("weights").take("weights", tuple(task.like.shape), task.like)
        return TangentRows.of(task, w, client.x, client.y, self.form)

    def evolve(self, task: Task, rows: Gathered, times: Sequence[float], most_products: int | None = None) -> Evolution:
        """The flow of these rows' outputs from f0 towards their labels up to each of the times, with at most
        `most_products` kernel products.
        """
        f0, y = rows.f0, rows.y
        if self.prior and self.loss == "ce":
            shares = torch.bincount(y, minlength=task.outputs).to(f0) / len(y)
            f0 = f0 + self.prior * (shares + _RARE).log()
        how = (self.loss, self.kernel, self.scheme, self.tolerance, most_products)
        return evolve(rows.J, f0, task.training_targets(y), self.lr, times, *how)

    def select(self, task: Task, candidates: Tensor, round: int) -> Generator[Outgoing, Replies, tuple[int, float]]:
        """(which of the candidates [S, d] to take, its mean loss), as the cohort or a validation set finds."""
        if self.choose == "validation":
            return validate(task, candidates)
        replies = yield Message("candidates", round, pack_span(candidates))
        if any(len(reply.means()) != len(candidates) for reply in replies):
            raise MessageError(f"losses of other candidates than the {len(candidates)} asked about")
        return choose(replies, task.robust.trim_losses)

    def times(self, state: State) -> tuple[float, ...]:
        """t_1 … t_S of this round: `steps`, and as many doublings of the last as earlier rounds added."""
        steps = self.steps or geometric_steps(self.lr)
        return (*steps, *(steps[-1] * 2.0**k for k in range(1, _doublings(state) + 1)))

    @property
    def grows(self) -> bool:
        """Whether candidates may become longer than any of `steps`: where nobody chose the times."""
        return self.steps is None and self.kernel == "full" and self.scheme == "flow"

    def extended(self, state: State, evolution: Evolution, best: int) -> tuple[State, dict[str, float | str]]:
        """(the part of the next state that says how long candidates are, a warning where they are too short).

        They double where the longest asked for won and the flow has hardly begun by then. A cohort takes the longest
        also where it is long already, as it fits its own samples ever better: longer ones then cost time, and accuracy
        where weights are not averaged.
        """
        doublings, chosen = _doublings(state), evolution.steps[best]
        warning: dict[str, float | str] = {}
        if chosen == self.times(state)[-1] and residual_left(evolution) > _SHORT:
            if self.grows and doublings < _DOUBLINGS:
                doublings += 1
            else:
                won = f"the longest candidate, t = {chosen:g}, was chosen, and training has hardly begun by then"
                warning = {"warning": f"{won}: give longer steps, or none, which grow by themselves"}
        return {_EXTENDED: torch.tensor(doublings)} if doublings else {}, warning


def _doublings(state: State) -> int:
    return int(state[_EXTENDED]) if _EXTENDED in state else 0


def residual_left(evolution: Evolution) -> float:
    """The mean residual of the whole flow in units of the first candidate's, ‖R(t_S)/t_S‖ / ‖R(t_1)/t_1‖: 1 where
    hardly anything has been learned by t_S, towards 0 where most of t_S was spent on what was learned before.
    """
    first, last = (evolution.residuals[i].norm() / evolution.steps[i] for i in (0, -1))
    return float(last / first) if first > 0 else 0.0
