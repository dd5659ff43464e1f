"""NTK-FL and CP-NTK-FL. Yue et al., Neural Tangent Kernel Empowered Federated Learning, ICML 2022.

Clients send per-sample Jacobians, outputs and labels; the server evolves the weights along the tangent kernel to a
grid of times and keeps the time at which the cohort's own loss is least. A round is, with N samples in the cohort:

    (1)  J, f(w), y of every sample                        clients, `TangentRows`
    (2)  f' = η/N J Jᵀ (Y − softmax f) from f(w)           server, `NTKFL.evolve`: residuals accumulate to R(t)
    (3)  w(t_s) = w + (η/N) Jᵀ R(t_s),  s = 1 … S          candidates
    (4)  w ← the w(t_s) of least loss over the cohort      clients report theirs, `CandidateLosses`

`NTKFL.round` is this box. CP-NTK-FL is the same with projected inputs, sparse Jacobians and a shuffler between.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError, NumericalError
from ntkfl.methods.base import Method, Outcome, Outgoing, Replies, Round
from ntkfl.methods.replies import SAMPLES, Reply, Rows
from ntkfl.methods.robust import fair_counts, median, trimmed_mean
from ntkfl.methods.task import ClientRound, State, Task, blank_sample, check_finite, labels_of
from ntkfl.privacy.settings import Privacy
from ntkfl.privacy.sparsify import kept, sparsify
from ntkfl.tangent import Evolution, Jacobian, concatenate, evolve, geometric_steps
from ntkfl.wire.jacobians import pack_jacobian, unpack_jacobian
from ntkfl.wire.message import Message, pack_labels
from ntkfl.wire.topk import pack_topk, unpack_topk

DIRECTIONS = 4  # in which candidates may differ as they travel
MOST_CANDIDATES = 4096  # a client makes them all, of a message that hardly grows with their number
OVERFLOW = 1e30  # the loss of a candidate that overflows: large, finite, a valid message
ROW_LIMIT = 1.5  # with row_clip: rows of one client that count, at most, in units of the median client's
_LOSSES = "losses"
_RARE = 1e-3  # added to a class's share: a class that is missing is not infinitely rare
_SHORT = 0.8  # residual left, on average over a flow, above which it has hardly begun


class TangentRows(Rows):
    """A row per sample: its Jacobian [d2, d], its outputs [d2] and its label.

    A Jacobian travels in the form it was made in (factored by layer, or dense), or with `[privacy] sparsity` as its
    largest values alone. Received ones are decoded when they are checked: `J`, `outputs` [n, d2] and `labels` are on
    the CPU until `gather` moves them.
    """

    extreme = (10.0, 100.0, 100.0, 100.0)  # outputs, targets and inputs differ more between rows than Jacobians do

    J: Jacobian
    outputs: Tensor
    labels: Tensor

    @classmethod
    def of(cls, task: Task, w: Tensor, x: Tensor, y: Tensor, form: str = "auto") -> Self:
        """(1) The rows of samples (x, y) at the weights w [d]. Costs a Jacobian of n samples and one forward pass."""
        J = pack(sparsify(task.jacobian(w, x, form), task.privacy.sparsity), task.privacy)
        return cls({"outputs": task.predict(w, x), "labels": pack_labels(y, task.outputs)} | J)

    @classmethod
    def blank(cls, method: Method, task: Task, question: Message) -> Self:
        return cls.of(task, task.like, *blank_sample(task), getattr(method, "form", "auto"))

    def check(self, task: Task) -> None:
        """Decodes J against the network's (d2, d) and the run's settings: no array decides its own shape."""
        outputs, columns, privacy = task.outputs, task.like.numel(), task.privacy
        like = task.like.new_empty(0, device="cpu")
        if privacy.sparsity:
            k = kept(privacy.sparsity, outputs * columns)
            self.J = unpack_topk(self, outputs, columns, k, privacy.values, like)
        else:
            self.J = unpack_jacobian(self, outputs, columns, like)
        n, y = len(self.J), self.take("labels")
        self.outputs, self.labels = self.take("outputs", (n, outputs), like), labels_of(y, like)
        if y.ndim not in (1, 2) or len(y) != n:
            raise MessageError(f"labels of shape {list(y.shape)} for {n} samples")
        if y.is_floating_point():
            if task.loss == "ce":
                raise MessageError("real-valued targets where classes are trained")
        elif y.ndim != 1 or not 0 <= int(y.min()) <= int(y.max()) < outputs:
            raise MessageError(f"a label that is none of the {outputs} classes")

    def sizes(self, task: Task) -> Tensor:
        """Of each row the Jacobian's norm, and the largest output, target and number stored: [n, 4]."""
        J, f0, y = self.J, self.outputs, self.labels
        stored = [t.flatten(1).abs().amax(1) for t in J.tensors() if t.is_floating_point()]
        targets = y.abs().flatten(1).amax(1) if y.is_floating_point() else torch.zeros_like(f0[:, 0])
        return torch.stack([J.norms(), f0.abs().amax(1), targets, torch.stack(stored).amax(0)], dim=1)


class CandidateLosses(Reply):
    """A client's mean loss under each of S candidates, `losses` float64 [1, S], and its number of `samples` [].

    Through a shuffler the losses alone. A row per sample could be matched to the upload it belongs to, a number of
    samples would tell clients apart, and either would let a client vote more than once.
    """

    kind = "rows"

    @classmethod
    def of(cls, task: Task, candidates: Tensor, client: ClientRound) -> Self:
        """(4) The losses of candidates [S, d] on the client's samples: S forward passes, no data moved."""
        means = task.candidate_losses(candidates, client.x, client.y).double().mean(1, keepdim=True).mT
        return cls._told(task, means.nan_to_num(nan=OVERFLOW, posinf=OVERFLOW).clamp(max=OVERFLOW), len(client))

    @classmethod
    def blank(cls, method: Method, task: Task, question: Message) -> Self:
        return cls._told(task, torch.zeros(1, len(unpack_candidates(question, task.like))).double(), 1)

    @classmethod
    def _told(cls, task: Task, means: Tensor, samples: int) -> Self:
        counted = {} if task.privacy.shuffle else {SAMPLES: torch.tensor(samples, dtype=torch.int32)}
        return cls({_LOSSES: means} | counted)

    def check(self, task: Task) -> None:
        """Refuses losses that no sample can have: negative ones would outvote every honest client."""
        losses = self.means()
        if bool(((losses < 0) | (losses > 1.01 * OVERFLOW)).any()):
            raise MessageError(f"a loss below zero, or above {OVERFLOW:g}")
        if (SAMPLES in self.arrays) == task.privacy.shuffle or not 1 <= self.samples < 2**31:
            raise MessageError("losses come with a number of samples from 1 on, or through a shuffler without one")

    @property
    def samples(self) -> int:
        """Samples that the losses are of; 1 where a shuffler hides it."""
        return int(self.take(SAMPLES, ())) if SAMPLES in self.arrays else 1

    def means(self) -> Tensor:
        """The client's mean loss of each candidate, float64 [S]."""
        return self.take(_LOSSES, (1, None))[0].double()


class NTKFL(Method):
    """w^(k,t) = w^(k) + (η/N) Jᵀ R(t): J has a row for each of the cohort's N samples, and R(t) are their residuals
    accumulated along the kernel up to t. w^(k+1) is the w^(k,t) of least loss over the cohort.

    The defaults are the full kernel, smoothed labels and averaged weights. The paper's own settings are
    `NTKFL(kernel="trace", scheme="paper", steps=range(100, 2001, 100), label_smoothing=0, average=0)`.
    """

    name = "ntk-fl"
    replies = {"weights": TangentRows, "candidates": CandidateLosses}
    tolerance: ClassVar[float] = 1e-3  # relative error of each step of the flow's integration
    prior: ClassVar[float] = 0.0  # τ: outputs train with τ log(the round's share of each class) added to them

    average: float = Field(0.9, ge=0, lt=1, description="running average of the rounds' weights; 0 is the paper")
    label_smoothing: float = Field(
        0.1, ge=0, lt=1, description="part of a class label spread over all classes; 0 is the paper"
    )
    lr: float = Field(0.01, gt=0, description="η; with the flow only η·t counts")
    kernel: Literal["full", "trace"] = Field("full", description="full (the linearised network) or trace (the paper's)")
    scheme: Literal["flow", "paper"] = Field("flow", description="how residuals add up along the kernel")
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

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """The paper's box: broadcast w, stack the clients' rows, evolve to every t, let the cohort choose one.

        Cost: a Jacobian of N rows in memory (factored: inputs and sensitivities of each layer), some 50 to 100 kernel
        products for the evolution, S candidate weights [S, d]. Downlink: w, and all candidates in 10 bytes a weight.
        """
        w = state["weights"]
        uploads = yield Message("weights", round, {"weights": w})
        rows = gather(task, uploads, round)  # (1) J, f0 and y of all clients' samples
        evolution = self.evolve(task, rows, self.steps or geometric_steps(self.lr))  # (2)
        candidates = check_finite(w + evolution.deltas(), "a candidate")  # (3) w(t_1) … w(t_S)
        best, loss = yield from self.select(task, candidates, round)  # (4)
        return Outcome({"weights": candidates[best].clone()}, loss, evolution.steps[best], notes(rows, evolution, best))

    def answer(self, task: Task, question: Message, client: ClientRound) -> Reply:
        """To weights, the rows of all of the client's samples; to candidates, its losses under each of them."""
        if question.kind == "candidates":
            return CandidateLosses.of(task, unpack_candidates(question, task.like), client)
        w = question.of_kind("weights").vector("weights", task.like)
        return TangentRows.of(task, w, client.x, client.y, self.form)

    def evolve(self, task: Task, rows: Gathered, times: Sequence[float]) -> Evolution:
        """(2) The flow of these rows' outputs from f0 towards their labels up to each of the times."""
        f0, y = rows.f0, rows.y
        if self.prior and self.loss == "ce":
            shares = torch.bincount(y, minlength=task.outputs).to(f0) / len(y)
            f0 = f0 + self.prior * (shares + _RARE).log()
        how = (self.loss, self.kernel, self.scheme, self.tolerance)
        return evolve(rows.J, f0, task.training_targets(y), self.lr, times, *how)

    def select(self, task: Task, candidates: Tensor, round: int) -> Generator[Outgoing, Replies, tuple[int, float]]:
        """(which of the candidates [S, d] to take, its mean loss), as the cohort or a validation set finds."""
        if self.choose == "validation":
            if task.validation is None:
                raise ConfigError("choosing t by validation needs held-out clients: hold some out (--set hold_out=10)")
            losses = task.candidate_losses(candidates, *task.validation).mean(1)
            best = argmin(losses)
            return best, float(losses[best])
        replies = yield candidates_question(round, candidates)
        if any(len(reply.means()) != len(candidates) for reply in replies):
            raise MessageError(f"losses of other candidates than the {len(candidates)} asked about")
        return choose(replies, task.robust.trim_losses)


class CPNTKFL(NTKFL):
    """CP-NTK-FL, section 3.3 of the paper: NTK-FL made communication-efficient and privacy-preserving.

    Each client subsamples its data, projects them with a secret matrix, sends the largest entries of its Jacobians
    alone, and sends them sealed, through a shuffler. A preset: every stage is a setting of `[privacy]`, with the
    paper's d1' = 200 and β = 0.3. With `sparsity = 0` clients send, in effect, the projected inputs themselves.
    What the paper leaves open was chosen on held-out clients: docs/compare.md.
    """

    name = "cp-ntk-fl"
    prior = 0.5
    _privacy: ClassVar[Privacy] = Privacy(
        subsample_rate=0.3, projected_dim=200, projection="smooth", sparsity=0.97, values="8bit", shuffle=True
    )

    label_smoothing: float = Field(0.2, ge=0, lt=1, description="part of a class label spread over all classes")


# -- The cohort's rows -------------------------------------------------------------------------------------------------


@dataclass
class Gathered:
    """All rows of a round: J [N, d2, d], outputs f0 [N, d2] and labels y; how many were left out or scaled down."""

    J: Jacobian
    f0: Tensor
    y: Tensor
    bounded: dict[str, float | str] = field(default_factory=dict)


def gather(task: Task, uploads: list[TangentRows], round: int) -> Gathered:
    """All rows of the round on the weights' device. The list is emptied as it is read.

    With `[robust] row_clip` no client has more than 1.5 times the median client's rows, and no row is longer than that
    many times the median one: with cross-entropy a row moves the weights by at most √2 ηt ‖J_i‖/N.
    """
    sent, clip = torch.tensor([len(upload.J) for upload in uploads]), task.robust.row_clip
    counted = fair_counts(sent, ROW_LIMIT) if clip else sent
    jacobians, f0, y, device = list[Jacobian](), list[Tensor](), list[Tensor](), task.like.device
    for n, most in zip(sent.tolist(), counted.tolist(), strict=True):
        upload = uploads.pop(0)
        J = upload.J
        if n > most:  # drawn by the round's number alone: a server that repeats the round leaves out the same ones
            rows = torch.randperm(n, generator=torch.Generator().manual_seed(round))[:most].sort().values
            J, upload.outputs, upload.labels = J[rows], upload.outputs[rows], upload.labels[rows]
        jacobians.append(J.to(device))
        f0.append(upload.outputs.to(device))
        y.append(upload.labels.to(device))
    found = Gathered(concatenate(jacobians), torch.cat(f0), torch.cat(y))
    if surplus := int((sent - counted).sum()):
        found.bounded["surplus_rows"] = surplus
    if clip:
        norms = found.J.norms()
        factors = (clip * median(norms) / norms.clamp_min(1e-300)).clamp(max=1)
        if clipped := int((factors < 1).sum()):
            found.J, found.bounded["clipped_rows"] = found.J.scaled(factors), clipped
    return found


def notes(rows: Gathered, evolution: Evolution, best: int) -> dict[str, float | str]:
    """What a round's record says of its rows and their evolution, with a warning where training has hardly begun by
    the longest time, and that was chosen.
    """
    stats, found = evolution.statistics, dict(rows.bounded)
    found |= {"samples": len(rows.y), "kernel_products": stats.evaluations, "solver_error": stats.worst_error}
    if stats.fallback:
        found["solver_fallback"] = stats.fallback
    if best == len(evolution.steps) - 1 and residual_left(evolution) > _SHORT:
        longest = f"the longest candidate, t = {evolution.steps[-1]:g}, was chosen"
        found["warning"] = f"{longest}, and training has hardly begun by then: give longer steps"
    return found


def residual_left(evolution: Evolution) -> float:
    """The mean residual of the whole flow in units of the first candidate's, ‖R(t_S)/t_S‖ / ‖R(t_1)/t_1‖: 1 where
    hardly anything has been learned by t_S, towards 0 where most of t_S was spent on what was learned before.
    """
    first, last = (evolution.residuals[i].norm() / evolution.steps[i] for i in (0, -1))
    return float(last / first) if first > 0 else 0.0


def pack(J: Jacobian, privacy: Privacy) -> dict[str, Tensor]:
    """The arrays of a reply that hold J: sparse rows as top-k codes, others as they are stored."""
    return pack_topk(J, privacy.values) if privacy.sparsity else pack_jacobian(J)


# -- The choice among candidates ---------------------------------------------------------------------------------------


def candidates_question(round: int, candidates: Tensor) -> Message:
    """w(t_1) … w(t_S) [S, d], points of one smooth path, as o + C B: o = w(t_S), the four principal directions B [4, d]
    of the others around it, both in float16, and coordinates C [S, 4].

    Clients judge these approximations, and the server goes on with the exact weights of the candidate they choose: what
    is lost never enters the weights, it can only move the choice between candidates of nearly equal losses.
    """
    U, sizes, directions = torch.linalg.svd(candidates - candidates[-1], full_matrices=False)
    r = min(DIRECTIONS, len(candidates) - 1)  # one of them is o itself
    arrays = {"last": candidates[-1], "directions": directions[:r], "coordinates": (U * sizes)[:, :r]}
    return Message("candidates", round, arrays, halves=("last", "directions"))


def unpack_candidates(message: Message, like: Tensor) -> Tensor:
    """The candidates [S, d] of a message, d as `like` [d] has it; in its type and on its device."""
    directions = message.take("directions", (None, like.numel()), like)
    coordinates = message.take("coordinates", (None, len(directions)), like)
    if len(directions) > DIRECTIONS or not 1 <= len(coordinates) <= MOST_CANDIDATES:
        raise MessageError(
            f"{len(coordinates)} candidates along {len(directions)} directions are more than can be sent"
        )
    return message.vector("last", like) + coordinates @ directions


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


def argmin(losses: Tensor) -> int:
    """The candidate of least loss; `NumericalError` where none has one."""
    best = int(losses.nan_to_num(nan=float("inf")).argmin())
    if not bool(losses[best].isfinite()):
        raise NumericalError("no candidate has a finite loss: the evolution left the range where the network works")
    return best
