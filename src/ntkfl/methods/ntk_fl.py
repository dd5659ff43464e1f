"""NTK-FL. Yue et al., Neural Tangent Kernel Empowered Federated Learning, ICML 2022.

Clients send sample-wise Jacobians, outputs and labels; the server evolves the weights along the tangent kernel to a
grid of times and keeps the time at which the cohort's own loss is least.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError, unknown
from ntkfl.methods.base import Client, Method, Outcome, Outgoing, State, Task, check_finite, take_labels
from ntkfl.methods.batching import in_groups, joined
from ntkfl.methods.gathering import Gathered, gather
from ntkfl.methods.replay import INPUTS, LABELS, balanced, recover, remember
from ntkfl.methods.robust import budget, clip_rows, no_costs, opposed, with_cost, without_outliers
from ntkfl.methods.step_selection import CHOICES, argmin, check_scores, choose, scores, validate
from ntkfl.privacy.noise import flip_labels, noisy_rows
from ntkfl.privacy.sparsify import kept, sparsify
from ntkfl.tangent import Evolution, Jacobian, evolve, geometric_steps
from ntkfl.tangent.build import FORMS
from ntkfl.tangent.evolution import KERNELS, SCHEMES
from ntkfl.wire import Message, join_rows, pack_jacobian, pack_labels, split_rows, unpack_jacobian
from ntkfl.wire.topk import pack_topk, unpack_topk

_RARE = 1e-3  # added to a class's share: one that is missing is not infinitely rare
_TOGETHER = 2**27  # numbers of clients' Jacobians made at once on an accelerator: 512 MiB in float32
_SCORED = 4096  # rows of clients scored together
COSTS = "products"  # of the last rounds, in the server's state
CODECS = ("auto", "factored", "dense", "topk")


class NTKFL(Method):
    """The defaults are the full kernel, smoothed labels and averaged weights; `NTKFL(kernel="trace", average=0)` is the
    paper's.
    """

    name: ClassVar[str] = "ntk-fl"
    sparsifies: ClassVar[bool] = True
    noises: ClassVar[bool] = True
    rows_are_samples: ClassVar[bool] = True
    sampled: ClassVar[tuple[str, ...]] = ("upload",)
    extreme: ClassVar[tuple[float, ...]] = (10.0, 100.0, 100.0, 100.0)  # outputs and inputs differ more than norms do
    paper: ClassVar[str] = "Yue et al. 2022"

    average: float = Field(0.9, ge=0, lt=1, description="running average of the rounds' weights; 0 is the paper")
    label_smoothing: float = Field(
        0.1, ge=0, lt=1, description="part of a class label spread over all; by default 0 with the paper's trace kernel"
    )
    lr: float = Field(0.01, gt=0, description="η; with the flow only η·t counts")
    kernel: str = Field("full", description="full (the linearised network) or trace (the paper's)")
    scheme: str = Field("flow", description="flow, descent or paper")
    steps: tuple[float, ...] | None = Field(
        None, description="candidate numbers of steps t; default: geometric in η·t up to 40; the paper: 100, 200 … 2000"
    )
    tolerance: float = Field(1e-3, ge=1e-9, lt=1, description="relative error of each step of the flow's integration")
    choose: str = Field("cohort", description="t by the cohort's own losses, or by a validation set (held-out clients)")
    codec: str = Field(
        "auto",
        description="how Jacobians are sent: factored, dense, topk (sparsified); auto: topk where sparsity is set",
    )

    logit_adjustment: float = Field(
        0.0,
        ge=0,
        description="τ: trains the outputs with τ·log(the round's share of each class) added to them",
    )
    label_flip: float = Field(
        0.0, ge=0, le=1, description="chance that a label is drawn anew from all classes; by default 0.2 with noise"
    )
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
    row_limit: float = Field(
        1.5, ge=1, description="rows of one client that count, at most, in units of the median client's; not shuffled"
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
    replay: bool = Field(False, description="the server keeps projected inputs and goes on training on them each round")
    replay_evolutions: int = Field(4, ge=1, description="evolutions on kept inputs after each round's own")
    replay_per_class: int = Field(120, ge=1, description="kept inputs of each class in such an evolution")

    @model_validator(mode="before")
    @classmethod
    def _resolve_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Defaults that depend on other options, so that a run's settings say what they came to.

        Smoothing is ours: who asks for the paper's kernel gets the paper's labels, unless told otherwise.
        """
        out = dict(values)
        if out.get("kernel") == "trace" or out.get("loss", "ce") != "ce":
            out.setdefault("label_smoothing", 0.0)
        if out.get("kernel") == "trace":
            out = {"trim_losses": 0.0, "row_clip": None, "drop_opposed": False} | out
        if out.get("kernel") == "trace" or out.get("shuffle", cls.model_fields["shuffle"].default):
            out.setdefault("trim", 0.0)  # single rows, which have no senders, tell too little
        if out.get("replay"):  # several steps a round in the average, and inputs that can be had from uploads
            out.setdefault("average", 0.98)
            out.setdefault("codec", "factored")
        if out.get("noise"):  # an input hidden beside a label that is not would be no guarantee for the record
            out.setdefault("label_flip", 0.2)
        lr = out.get("lr", cls.model_fields["lr"].default)
        if out.get("steps") is None and out.get("scheme", "flow") == "flow" and isinstance(lr, float | int) and lr > 0:
            out["steps"] = geometric_steps(lr)
        return out

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        for kind, value, known in (
            ("kernel", self.kernel, KERNELS),
            ("scheme", self.scheme, SCHEMES),
            ("choice of t", self.choose, CHOICES),
            ("codec", self.codec, CODECS),
        ):
            if value not in known:
                raise unknown(kind, value, known)
        if (self.codec == "topk") != (self.sparsity > 0) and self.codec != "auto":
            raise ConfigError("codec 'topk' and a sparsity above 0 go together: sparsified rows have no other form")
        if self.replay and self.codec != "factored":
            raise ConfigError("replay needs the inputs, which factored uploads alone hold: codec 'factored'")
        if self.verify and (self.sparsity or self.codec == "dense"):
            raise ConfigError("verify computes rows again from the inputs that factored uploads alone hold")
        if self.scheme != "flow" and self.steps is None:
            raise ConfigError(f"scheme {self.scheme!r} takes whole steps: give them, for example 100, 200 … 2000")

    def start(self, task: Task, weights: Tensor) -> State:
        return super().start(task, weights) | {COSTS: no_costs()}

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        w = state["weights"]
        uploads = yield Message("weights", round, {"weights": w})
        rows = gather(self.read, task, w, uploads, round, self.row_limit, self.verify)
        self._bound(rows)
        costs = state.get(COSTS, no_costs())  # a checkpoint of an earlier version has none
        products = budget(costs)
        evolution = self._evolve(task, rows, products)
        if self.trim:
            keep = without_outliers(evolution, self.trim, None if self.shuffle else rows.senders)
            if rows.keep(keep, "trimmed_rows"):
                evolution = self._evolve(task, rows, products)
        candidates = w + evolution.deltas()  # w^(k,t_1) … w^(k,t_Ψ)

        if self.choose == "cohort":
            replies = yield Message("candidates", round, {"weights": candidates})
            best, loss = choose(replies, len(candidates), self.shuffle, self.trim_losses)
        else:
            losses = validate(task, candidates)
            best = argmin(losses)
            loss = float(losses[best])
        stats = evolution.statistics
        outcome = Outcome(
            {
                "weights": check_finite(candidates[best].clone(), "the chosen model"),
                COSTS: with_cost(costs, stats.evaluations),
            },
            loss,
            evolution.steps[best],
            {"samples": len(rows.y), "kernel_products": stats.evaluations, "solver_error": stats.worst_error}
            | rows.notes
            | ({"solver_fallback": stats.fallback} if stats.fallback else {}),
        )
        if not self.replay:
            return outcome
        return self._replay(task, state, round, outcome, recover(task, w, rows.J, rows.f0, rows.y))

    def answer(self, task: Task, message: Message, clients: Sequence[Client]) -> list[Message]:
        d = task.like.numel()
        clients = [self.private(task, client) for client in clients]
        if message.kind == "candidates":
            candidates = message.take("weights", (None, d), task.like)
            if not len(candidates):
                raise MessageError("the server asks which candidate is best, and sends none")
            groups = in_groups(clients, _SCORED)
            return [losses for some in groups for losses in scores(task, message.round, candidates, some, self.shuffle)]
        w = message.of_kind("weights").take("weights", (d,), task.like)
        return [
            upload for some in self._groups(task, clients) for upload in self._uploads(task, message.round, w, some)
        ]

    def private(self, task: Task, client: Client) -> Client:
        """With its noisy copy in place of its samples: the same one at every exchange of a round."""
        if self.clip is None and not self.label_flip:
            return client
        own = client.randomness
        x = client.x if self.clip is None else noisy_rows(client.x, self.clip, self.noise, own)
        return replace(client, x=x, y=flip_labels(client.y, task.outputs, self.label_flip, own))

    def _bound(self, rows: Gathered) -> None:
        """No row longer than the others, and none against those of its label, where that is asked for."""
        if self.row_clip is not None:
            rows.J, clipped = clip_rows(rows.J, self.row_clip)
            rows.notes |= {"clipped_rows": clipped} if clipped else {}
        if self.drop_opposed and not rows.verified and not rows.y.is_floating_point():
            rows.keep((~opposed(rows.J, rows.y)).nonzero()[:, 0], "opposed_rows")

    def _evolve(self, task: Task, rows: Gathered, products: int | None = None) -> Evolution:
        f0, y = rows.f0, rows.y
        if self.logit_adjustment and not y.is_floating_point():
            prior = torch.bincount(y, minlength=task.outputs).to(f0) / len(y)
            f0 = f0 + self.logit_adjustment * (prior + _RARE).log()
        how = (self.loss, self.kernel, self.scheme, self.tolerance, products)
        return evolve(rows.J, f0, task.training_targets(y), self.lr, self.steps, *how)

    def _replay(self, task: Task, state: State, round: int, outcome: Outcome, rows: tuple[Tensor, Tensor]) -> Outcome:
        """More evolutions, each linearised anew at the weights it begins from, on rows of this and earlier rounds."""
        kept = remember(state, *rows)
        w, passed = outcome.state["weights"], []
        for step in range(self.replay_evolutions):
            drawn = balanced(kept[LABELS], self.replay_per_class, task.outputs, round, step)
            z, y = kept[INPUTS][drawn], kept[LABELS][drawn]
            evolution = self._evolve(task, Gathered(task.jacobian(w, z), task.predict(w, z), y, torch.zeros_like(y)))
            candidates = w + evolution.deltas()
            losses = task.candidate_losses(candidates, z, y).mean(1)
            passed.append(w)
            w = check_finite(candidates[argmin(losses)].clone(), "the chosen model")
        diagnostics = outcome.diagnostics | {"kept_samples": len(kept[LABELS])}
        after = outcome.state | {"weights": w} | kept
        return Outcome(after, outcome.train_loss, outcome.steps, diagnostics, tuple(passed))

    def _groups(self, task: Task, clients: Sequence[Client]) -> list[list[Client]]:
        """Clients to differentiate together: each alone, or on an accelerator as many as keep it busy."""
        if task.like.device.type == "cpu":
            return [[client] for client in clients]
        return in_groups(clients, _TOGETHER // task.plan(clients[0].x, self._form).stored)

    def _uploads(self, task: Task, round: int, w: Tensor, clients: Sequence[Client]) -> list[Message]:
        x = joined([client.x for client in clients])
        J, f0 = task.jacobian(w, x, self._form), task.predict(w, x)
        uploads, at = [], 0
        for client in clients:
            rows = slice(at, at + len(client))
            own = J[rows] if len(clients) > 1 else J
            packed = pack_topk(sparsify(own, self.sparsity), self.values) if self.sparsity else pack_jacobian(own)
            labels = pack_labels(client.y, task.outputs)
            uploads.append(Message("upload", round, {"outputs": f0[rows], "labels": labels} | packed))
            at = rows.stop
        return uploads

    @property
    def _form(self) -> str:
        return self.codec if self.codec in FORMS else "auto"

    def read(self, task: Task, upload: Message, like: Tensor | None = None) -> tuple[Jacobian, Tensor, Tensor]:
        """(J, f0, y) of an upload, everything checked; of the type and on the device of `like`, or of the weights."""
        like, outputs, columns = task.like if like is None else like, task.outputs, task.like.numel()
        upload.of_kind("upload")
        J: Jacobian
        if self.sparsity:
            k = kept(self.sparsity, outputs * columns)
            J = unpack_topk(upload, outputs, columns, k, self.values, like)
        else:
            J = unpack_jacobian(upload, outputs, columns, like)
        f0 = upload.take("outputs", (len(J), outputs), like)
        y = upload.take("labels")  # looked at where they are: what came in a message is on the CPU
        if y.ndim not in (1, 2) or len(y) != len(J):
            raise MessageError(f"labels of shape {list(y.shape)} for {len(J)} samples")
        if y.is_floating_point() and task.loss == "ce":
            raise MessageError("real-valued targets where classes are trained")
        if not y.is_floating_point() and (y.ndim != 1 or not 0 <= int(y.min()) <= int(y.max()) < outputs):
            raise MessageError(f"a label that is none of the {outputs} classes")
        y = take_labels(upload, "labels", like)
        return J, f0, y

    def split(self, reply: Message) -> list[Message]:
        return split_rows(reply)

    def join(self, rows: list[Message]) -> list[Message]:
        return [join_rows(rows)]

    def check(self, task: Task, reply: Message) -> Tensor | None:
        """Of an upload's rows, four sizes: the Jacobian's norm, the largest output, target and number stored."""
        if reply.kind != "upload":
            check_scores(reply, self.shuffle)
            return None
        J, f0, y = self.read(task, reply, task.like.new_empty(0, device="cpu"))
        largest = [t.flatten(1).abs().amax(1) for t in J.tensors() if t.is_floating_point()]
        targets = y.abs().flatten(1).amax(1) if y.is_floating_point() else torch.zeros(len(y))
        return torch.stack([J.norms(), f0.abs().amax(1), targets, torch.stack(largest).amax(0)], dim=1)
