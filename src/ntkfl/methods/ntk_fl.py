"""NTK-FL. Yue et al., Neural Tangent Kernel Empowered Federated Learning, ICML 2022.

Clients send sample-wise Jacobians, outputs and labels; the server evolves the weights along the tangent kernel to a
grid of times and keeps the time at which the cohort's own loss is least.

This file is the paper's box. What surrounds it has files of its own: how uploads are packed, read and checked
(`ntk_upload.py`), what bounds the harm that Byzantine clients do (`robust_rows.py`), and the grid of times and the
choice (`candidates.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator

from ntkfl.errors import ConfigError, unknown
from ntkfl.methods.base import ClientRound, Outcome, Outgoing, State, Task, check_finite
from ntkfl.methods.candidates import Candidates
from ntkfl.methods.robust_rows import Gathered, product_budget, spent
from ntkfl.tangent import Evolution, evolve, geometric_steps
from ntkfl.tangent.evolution import KERNELS, SCHEMES
from ntkfl.wire import Message

_RARE = 1e-3  # added to a class's share: one that is missing is not infinitely rare


class NTKFL(Candidates):
    """w^(k,t) = w^(k) + (η/N) Jᵀ R(t): J has a row for each of the cohort's N samples, and R(t) are their residuals
    accumulated along the kernel up to t. w^(k+1) is the w^(k,t) of least loss over the cohort.

    The defaults are the full kernel, smoothed labels and averaged weights; `NTKFL(kernel="trace", average=0)` is the
    paper's.
    """

    name: ClassVar[str] = "ntk-fl"
    paper: ClassVar[str] = "Yue et al. 2022"
    tolerance: ClassVar[float] = 1e-3  # relative error of each step of the flow's integration
    prior: ClassVar[float] = 0.0  # τ: outputs train with τ log(the round's share of each class) added to them

    average: float = Field(0.9, ge=0, lt=1, description="running average of the rounds' weights; 0 is the paper")
    label_smoothing: float = Field(
        0.1, ge=0, lt=1, description="part of a class label spread over all; by default 0 with the paper's trace kernel"
    )
    lr: float = Field(0.01, gt=0, description="η; with the flow only η·t counts")
    kernel: str = Field("full", description="full (the linearised network) or trace (the paper's)")
    scheme: str = Field("flow", description="flow, descent or paper")

    @model_validator(mode="before")
    @classmethod
    def _resolve_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Defaults that depend on other options, so that a run's settings say what they came to.

        Smoothing is ours: the paper's kernel comes with the paper's labels, unless options say otherwise.
        """
        out = dict(values)
        if out.get("kernel") == "trace" or out.get("loss", "ce") != "ce":
            out.setdefault("label_smoothing", 0.0)
        lr = out.get("lr", cls.model_fields["lr"].default)
        if out.get("steps") is None and out.get("scheme", "flow") == "flow" and isinstance(lr, float | int) and lr > 0:
            out["steps"] = geometric_steps(lr)
        return out

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        for option, known in {"kernel": KERNELS, "scheme": SCHEMES}.items():
            if (value := getattr(self, option)) not in known:
                raise unknown(option, value, known)
        if self.scheme != "flow" and self.steps is None:
            raise ConfigError(f"scheme {self.scheme!r} takes whole steps: give them, for example 100, 200 … 2000")

    @property
    def grows(self) -> bool:
        """Where the times are the default's."""
        return self.kernel == "full" and self.scheme == "flow" and self.steps == geometric_steps(self.lr)

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        w, times, products = state["weights"], self.times(state), product_budget(state)
        uploads = yield Message("weights", round, {"weights": w})
        rows = self.gather(task, w, uploads, round)  # J, f0 and y of all clients
        evolution = self.agreeing(rows, lambda own: self.evolve(task, own, times, products))  # to every t of the grid
        candidates = w + evolution.deltas()  # w^(k,t_1) … w^(k,t_Ψ)
        best, loss = yield from self.select(task, candidates, round)
        new = check_finite(candidates[best].clone(), "the chosen model")
        kept = {"weights": new} | spent(state, evolution) | self.extended(state, evolution, best)
        notes = {"longest_steps": evolution.steps[-1]} | rows.diagnostics(evolution)
        return Outcome(kept, loss, evolution.steps[best], notes | self.too_short(state, evolution, best))

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        if message.kind == "candidates":
            return self.judge(task, message, clients)
        w = message.of_kind("weights").take("weights", (task.like.numel(),), task.like)
        return [self.upload(task, message.round, w, client) for client in clients]

    def evolve(self, task: Task, rows: Gathered, times: Sequence[float], products: int | None = None) -> Evolution:
        """The flow of these rows' outputs from f0 towards their labels up to each of the times, with at most so many
        kernel products.
        """
        f0, y = rows.f0, rows.y
        if self.prior and self.loss == "ce":
            shares = torch.bincount(y, minlength=task.outputs).to(f0) / len(y)
            f0 = f0 + self.prior * (shares + _RARE).log()
        how = (self.loss, self.kernel, self.scheme, self.tolerance, products)
        return evolve(rows.J, f0, task.training_targets(y), self.lr, times, *how)

    def advice(self) -> list[str]:
        if self.lr == type(self).model_fields["lr"].default or self.steps != geometric_steps(self.lr):
            return []
        how = "give steps to train for shorter or longer in a round"
        return [
            f"lr = {self.lr:g} changes nothing: with the flow η·t alone counts, and by default t goes with 1/η; {how}"
        ]
