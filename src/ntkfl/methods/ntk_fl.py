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

from ntkfl.errors import ConfigError, MessageError, NumericalError, unknown
from ntkfl.methods.base import Client, Method, Outcome, Outgoing, State, Task, check_finite, take_labels
from ntkfl.methods.cohort import in_groups, joined
from ntkfl.methods.replay import INPUTS, LABELS, balanced, recover, remember
from ntkfl.privacy.noise import flip_labels, noisy_rows
from ntkfl.privacy.sparsify import kept, sparsify
from ntkfl.tangent import Evolution, Jacobian, Stack, evolve, geometric_steps
from ntkfl.tangent.evolution import KERNELS, SCHEMES
from ntkfl.tangent.tracing import FORMS
from ntkfl.wire import Message, join_rows, pack_jacobian, pack_labels, split_rows, unpack_jacobian
from ntkfl.wire.topk import pack_topk, unpack_topk

CHOICES = ("cohort", "validation")
_RARE = 1e-3  # added to a class's share: one that is missing is not infinitely rare
_OVERFLOW = 1e30  # the loss of a candidate that overflows
_TOGETHER = 2**27  # numbers of clients' Jacobians made at once on an accelerator: 512 MiB in float32
_SCORED = 4096  # rows of clients scored together
CODECS = ("auto", "factored", "dense", "topk")


class NTKFL(Method):
    """The defaults are the full kernel, smoothed labels and averaged weights; `NTKFL(kernel="trace", average=0)` is the
    paper's.
    """

    name: ClassVar[str] = "ntk-fl"
    sparsifies: ClassVar[bool] = True
    noises: ClassVar[bool] = True
    rows_are_samples: ClassVar[bool] = True
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
    tolerance: float = Field(1e-3, gt=0, lt=1, description="relative error of each step of the flow's integration")
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
        if out.get("kernel") == "trace" or out.get("loss") == "mse":
            out.setdefault("label_smoothing", 0.0)
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
        if self.scheme != "flow" and self.steps is None:
            raise ConfigError(f"scheme {self.scheme!r} takes whole steps: give them, for example 100, 200 … 2000")

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        w = state["weights"]
        uploads = yield Message("weights", round, {"weights": w})
        J, f0, y = self._gather(task, uploads)
        evolution = self._evolve(task, J, f0, y)
        candidates = w + evolution.deltas()  # w^(k,t_1) … w^(k,t_Ψ)

        if self.choose == "cohort":
            replies = yield Message("candidates", round, {"weights": candidates})
            losses = self._mean_losses(replies, len(candidates))
        else:
            losses = self._validate(task, candidates)
        best = _least(losses)
        stats = evolution.statistics
        outcome = Outcome(
            {"weights": check_finite(candidates[best].clone(), "the chosen model")},
            float(losses[best]),
            evolution.steps[best],
            {"samples": len(J), "kernel_products": stats.evaluations, "solver_error": stats.worst_error},
        )
        return self._replay(task, state, round, outcome, recover(task, w, J, f0, y)) if self.replay else outcome

    def answer(self, task: Task, message: Message, clients: Sequence[Client]) -> list[Message]:
        d = task.like.numel()
        clients = [self.private(task, client) for client in clients]
        if message.kind == "candidates":
            candidates = message.take("weights", (None, d), task.like)
            if not len(candidates):
                raise MessageError("the server asks which candidate is best, and sends none")
            groups = in_groups(clients, _SCORED)
            return [losses for some in groups for losses in self._scores(task, message.round, candidates, some)]
        w = message.of_kind("weights").take("weights", (d,), task.like)
        return [
            upload for some in self._groups(task, clients) for upload in self._uploads(task, message.round, w, some)
        ]

    def private(self, task: Task, client: Client) -> Client:
        """With its noisy copy in place of its samples: the same one at every exchange of a round, by its seed."""
        if self.clip is None and not self.label_flip:
            return client
        draws = torch.Generator().manual_seed(client.seed)
        x = client.x if self.clip is None else noisy_rows(client.x, self.clip, self.noise, draws)
        return replace(client, x=x, y=flip_labels(client.y, task.outputs, self.label_flip, draws))

    def _evolve(self, task: Task, J: Jacobian, f0: Tensor, y: Tensor) -> Evolution:
        if self.logit_adjustment and not y.is_floating_point():
            prior = torch.bincount(y, minlength=task.outputs).to(f0) / len(y)
            f0 = f0 + self.logit_adjustment * (prior + _RARE).log()
        return evolve(
            J, f0, task.training_targets(y), self.lr, self.steps, self.loss, self.kernel, self.scheme, self.tolerance
        )

    def _replay(self, task: Task, state: State, round: int, outcome: Outcome, rows: tuple[Tensor, Tensor]) -> Outcome:
        """More evolutions, each linearised anew at the weights it begins from, on rows of this and earlier rounds."""
        kept = remember(state, *rows)
        w, passed = outcome.state["weights"], []
        for step in range(self.replay_evolutions):
            drawn = balanced(kept[LABELS], self.replay_per_class, task.outputs, round, step)
            z, y = kept[INPUTS][drawn], kept[LABELS][drawn]
            evolution = self._evolve(task, task.jacobian(w, z), task.predict(w, z), y)
            candidates = w + evolution.deltas()
            losses = task.candidate_losses(candidates, z, y).mean(1)
            passed.append(w)
            w = check_finite(candidates[_least(losses)].clone(), "the chosen model")
        diagnostics = outcome.diagnostics | {"kept_samples": len(kept[LABELS])}
        return Outcome({"weights": w} | kept, outcome.train_loss, outcome.steps, diagnostics, tuple(passed))

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

    def _gather(self, task: Task, uploads: list[Message]) -> tuple[Jacobian, Tensor, Tensor]:
        """(J, f0, y) of the whole round. Uploads are let go one by one: a round's Jacobian is never there twice."""
        if len(uploads) == 1:
            return self.read(task, uploads.pop())
        stack = Stack(sum(len(upload.take("outputs", (None, task.outputs))) for upload in uploads))
        f0, y = [], []
        while uploads:
            J, f, labels = self.read(task, uploads.pop(0))
            stack.add(J)
            f0.append(f)
            y.append(labels)
        return stack.whole(), torch.cat(f0), torch.cat(y)

    def read(self, task: Task, upload: Message) -> tuple[Jacobian, Tensor, Tensor]:
        """(J, f0, y) of an upload, everything checked."""
        like, outputs = task.like, task.outputs
        upload.of_kind("upload")
        J: Jacobian
        if self.sparsity:
            k = kept(self.sparsity, outputs * like.numel())
            J = unpack_topk(upload, outputs, like.numel(), k, self.values, like)
        else:
            J = unpack_jacobian(upload, outputs, like.numel(), like)
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

    def _scores(self, task: Task, round: int, candidates: Tensor, clients: Sequence[Client]) -> list[Message]:
        """The candidates' losses, the paper's criterion with no data moved: one sum each; shuffled, one row a sample.

        A candidate may overflow; a large finite number says so and stays a valid message.
        """
        x, y = joined([client.x for client in clients]), joined([client.y for client in clients])
        losses = task.candidate_losses(candidates, x, y)  # [S, n]
        counts = [len(client) for client in clients]
        if self.shuffle:
            rows = losses.T.nan_to_num(nan=_OVERFLOW, posinf=_OVERFLOW).clamp(max=_OVERFLOW)
            return [Message("losses", round, {"losses": own}) for own in torch.split(rows, counts)]
        sums = torch.stack([own.sum(1) for own in torch.split(losses, counts, dim=1)]).double()
        sums = sums.nan_to_num(nan=1e300, posinf=1e300).cpu()
        return [
            Message("losses", round, {"sums": own, "samples": torch.tensor(count, dtype=torch.int32)})
            for own, count in zip(sums, counts, strict=True)
        ]

    def _mean_losses(self, replies: list[Message], candidates: int) -> Tensor:
        """The cohort's mean loss of every candidate, [S]."""
        if self.shuffle:
            return torch.cat([r.of_kind("losses").take("losses", (None, candidates)) for r in replies]).double().mean(0)
        sums = torch.stack([r.of_kind("losses").take("sums", (candidates,)) for r in replies]).sum(0)
        return sums / sum(int(r.take("samples", ())) for r in replies)

    def split(self, reply: Message) -> list[Message]:
        return split_rows(reply)

    def join(self, rows: list[Message]) -> list[Message]:
        return [join_rows(rows)]

    def check(self, task: Task, reply: Message) -> None:
        if reply.kind == "upload":
            self.read(task, reply)
        else:
            losses = reply.of_kind("losses").take("losses", (None, None))
            if bool(((losses < 0) | (losses > 1.01 * _OVERFLOW)).any()):
                raise MessageError(f"a loss below zero, or above {_OVERFLOW:g}")

    def _validate(self, task: Task, candidates: Tensor) -> Tensor:
        if task.validation is None:
            raise ConfigError("choosing t by validation needs held-out clients: hold some out (--hold-out 10)")
        x, y = task.validation
        return task.candidate_losses(candidates, x, y).mean(1)


def _least(losses: Tensor) -> int:
    """The candidate of least loss; `NumericalError` where none has one."""
    best = int(losses.nan_to_num(nan=float("inf")).argmin())
    if not bool(losses[best].isfinite()):
        raise NumericalError("no candidate has a finite loss: the evolution left the range where the network works")
    return best
