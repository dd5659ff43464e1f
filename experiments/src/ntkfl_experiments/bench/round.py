"""A round of the paper's size: the server's flow against explicit steps, and the whole of it against the dense way."""

from __future__ import annotations

import torch
from torch import Tensor

from ntkfl.federation.validation import filter_replies
from ntkfl.methods import NTKFL, ClientRound, Task
from ntkfl.methods.ntk_fl import CandidateLosses, candidates_question, unpack_candidates
from ntkfl.models import mlp
from ntkfl.privacy.randomness import Randomness
from ntkfl.tangent import PAPER_STEPS, Evolution, concatenate, evolve, jacobian
from ntkfl.tangent.losses import targets
from ntkfl.wire import Message
from ntkfl_experiments.bench.dense import DenseWay, explicit_steps
from ntkfl_experiments.bench.inputs import fashion, synthetic
from ntkfl_experiments.bench.memory import update_peak
from ntkfl_experiments.bench.race import race, relative
from ntkfl_experiments.bench.rows import BenchRow, Setting

_LR = 0.01
_COMPARED_FROM = 500  # before that, flow and descent are different curves and both are right
_SLICE = 200  # explicit steps timed at a time: all are alike, and a short turn meets less noise than a long one


_CLIENTS = 20


class _Case:
    """The samples, the network, its Jacobian in factors; and the same as clients of a round."""

    def __init__(self, setting: Setting) -> None:
        self.N, self.side, self.hidden = (60, 14, 16) if setting.quick else (4000, 28, 100)
        self.steps = PAPER_STEPS[4:6] if setting.quick else PAPER_STEPS
        x, y, self.data = (*synthetic(self.N, self.side), "synthetic images") if setting.quick else fashion(self.N)
        self.x, self.y = x.to(setting.device), y.to(setting.device)
        torch.manual_seed(0)
        self.model = mlp(self.side**2, self.hidden, 10).to(setting.device)
        with torch.no_grad():
            self.f0 = self.model(self.x)
        parts = torch.split(self.x, self.N // _CLIENTS), torch.split(self.y, self.N // _CLIENTS)
        self.J = concatenate([jacobian(self.model, x) for x in parts[0]])
        self.task = Task(self.model, 10, "ce")
        self.clients = [
            ClientRound(i, x, y, Randomness.simulated(i)) for i, (x, y) in enumerate(zip(*parts, strict=True))
        ]

    def update(
        self, kernel: str = "full", geometric: bool = False, tolerance: float | None = None
    ) -> tuple[Evolution, Tensor]:
        """All candidate changes of the weights, [S, d]."""
        steps, rtol = None if geometric else self.steps, tolerance or self.method().tolerance
        evolution = evolve(self.J, self.f0, self.y, _LR, steps, kernel=kernel, rtol=rtol)
        return evolution, evolution.deltas()

    def method(self, kernel: str = "full") -> NTKFL:
        return NTKFL(lr=_LR, steps=self.steps, kernel=kernel, label_smoothing=0.0)

    def round(self, kernel: str = "full") -> Tensor:
        """Every client's Jacobian, the evolution, and all candidates scored by the cohort; every message encoded,
        checked and decoded, as a simulation does it.
        """
        method, task = self.method(kernel), self.task
        conversation = method.round(task, method.start(task, task.like), 1, [client.id for client in self.clients])
        outgoing = next(conversation)
        while True:
            assert isinstance(outgoing, Message)
            question = Message.decode(outgoing.encode())
            sent = [method.answer(task, question, client).message(1).encode() for client in self.clients]
            kind = method.replies[question.kind]
            try:
                outgoing = conversation.send(filter_replies(kind, task, [Message.decode(one) for one in sent]).replies)
            except StopIteration as end:
                new: Tensor = end.value.state["weights"]
                return new

    def score(self) -> object:
        """The candidates' losses: what a dense round pays as well."""
        question = candidates_question(1, self.task.like.expand(len(self.steps), -1))
        candidates = unpack_candidates(question, self.task.like)
        return [CandidateLosses.of(self.task, candidates, client) for client in self.clients]

    def descend(self, steps: tuple[int, ...], kernel: str = "full", rows: int | None = None) -> Evolution:
        J = self.J if rows is None else self.J[:rows]
        return evolve(J, self.f0[:rows], self.y[:rows], _LR, steps, kernel=kernel, scheme="descent")


def round(setting: Setting) -> list[BenchRow]:
    """A round's server update: all candidate weights of the paper's steps."""
    case = _Case(setting)
    timed = race(
        {
            "flow": case.update,
            "descent": lambda: case.descend((_SLICE,)),
            "geometric": lambda: case.update(geometric=True),
            "trace": lambda: case.update("trace"),
            "round": case.round,
            "trace round": lambda: case.round("trace"),
            "score": case.score,
        },
        turns=4,
        setting=setting,
    )
    seconds = {name: timing.seconds for name, timing in timed.items()}
    descent = seconds["descent"] * case.steps[-1] / _SLICE
    flow, changes = timed["flow"].result
    apart = {
        f"difference at t = {t}": relative(ours, theirs)
        for t, ours, theirs in zip(case.steps, changes, case.descend(case.steps).deltas(), strict=True)
        if t >= _COMPARED_FROM
    }
    # There and back through every layer for each evaluation.
    product = 4.0 * case.N * (case.side**2 * case.hidden + case.hidden * 10)
    size = f"N={case.N:,} {case.data}, {case.side**2}-{case.hidden}-10"
    products = flow.statistics.evaluations
    memory = update_peak(case.N, case.side, case.hidden, setting.device)
    usage = f"process peak {memory['peak'] / 1e9:.2f} GB, {memory['added'] / 1e9:.2f} GB by this" if memory else ""
    return [
        BenchRow(
            "flow, full kernel", seconds["flow"], 1.0, None, product * products, None, f"{size}; {products} products"
        ),
        BenchRow(
            f"{case.steps[-1]:,} explicit steps, full kernel",
            descent,
            descent / seconds["flow"],
            None if setting.quick else 4.0,
            product * case.steps[-1],
            max(apart.values()),
            f"at the worst t ≥ {_COMPARED_FROM}; same operators; timed by {_SLICE} steps",
            apart,
        ),
        _variant("flow, full kernel, geometric grid", timed["geometric"].result[0], seconds["geometric"], seconds),
        _tight(setting, case, changes, seconds["flow"]),
        _variant("flow, trace kernel", timed["trace"].result[0], seconds["trace"], seconds),
        BenchRow(
            f"a whole round of {_CLIENTS} clients",
            seconds["round"],
            1.0,
            note=f"Jacobians, flow, {len(case.steps)} candidates scored, messages in bytes; {usage}",
            details={f"{name}_bytes": count for name, count in memory.items()},
        ),
        _dense(setting, case, "full", 20 if setting.quick else 200, seconds["round"], seconds["score"]),
        BenchRow("a whole round, the paper's trace kernel", seconds["trace round"], 1.0),
        _dense(setting, case, "trace", 20 if setting.quick else 500, seconds["trace round"], seconds["score"]),
    ]


def _variant(what: str, evolution: Evolution, own: float, seconds: dict[str, float]) -> BenchRow:
    note = f"{len(evolution.steps)} steps, {evolution.statistics.evaluations} products"
    return BenchRow(what, own, own / seconds["flow"], note=note, ours=True)


def _tight(setting: Setting, case: _Case, changes: Tensor, ours: float) -> BenchRow:
    """The flow at a tenth of the tolerance; and how far both are from one at a thousandth."""
    finer = race({"flow": lambda: case.update(tolerance=case.method().tolerance / 10)}, turns=2, setting=setting)[
        "flow"
    ]
    evolution, found = finer.result
    exact = case.update(tolerance=case.method().tolerance / 1000)[1]
    off, left = relative(changes, exact), relative(found, exact)
    note = f"{evolution.statistics.evaluations} products; off by {left:.1e}, ours by {off:.1e}"
    return BenchRow(
        "flow, a tenth of the tolerance",
        finer.seconds,
        finer.seconds / ours,
        difference=relative(found, changes),
        note=note,
        details={"error": left, "our_error": off},
    )


def _dense(setting: Setting, case: _Case, kernel: str, few: int, ours: float, score: float) -> BenchRow:
    """Dense Jacobian, dense kernel, explicit steps and weights, measured on `few` rows and scaled to all of them.

    Candidates are scored as ours are.

    Jacobian and weights grow with N, the kernel and its products with N². Small products run in a cache that large
    ones do not fit, so what is scaled is too good, if anything.
    """
    growth = case.N / few
    Y, f0 = targets(case.y[:few], 10, "ce"), case.f0[:few]
    dense = DenseWay(case.model, case.x[:few], 10)
    dense.fill()
    H = dense.kernel(kernel)
    residuals = explicit_steps(H, f0, Y, _LR, case.steps)
    timed = race(
        {
            "Jacobian": dense.fill,
            "kernel": lambda: dense.kernel(kernel),
            "steps": lambda: explicit_steps(H, f0, Y, _LR, (_SLICE,)),
            "weights": lambda: dense.changes(residuals, _LR),
        },
        turns=3,
        setting=setting,
    )
    by = {"Jacobian": growth, "kernel": growth**2, "steps": growth**2 * case.steps[-1] / _SLICE, "weights": growth}
    parts = {name: timed[name].seconds * factor for name, factor in by.items()}
    total = sum(parts.values()) + score
    held = dense.gigabytes * growth + (H.nbytes * growth**2 / 1e9)
    return BenchRow(
        f"all dense, {kernel} kernel, explicit steps",
        total,
        total / ours,
        None if setting.quick else 200.0,
        difference=relative(timed["weights"].result, case.descend(case.steps, kernel, few).deltas()),
        note=f"scaled from N={few}: Jacobian ×{growth:g}, kernel ×{growth**2:g}; would hold {held:.2g} GB",
        details={f"{name}_seconds": part for name, part in parts.items()},
    )
