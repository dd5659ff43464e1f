"""A round of the paper's size: the server's flow against explicit steps, and the whole of it against the dense way."""

from __future__ import annotations

import torch
from torch import Tensor

from ntkfl.federation.transport import Traffic
from ntkfl.federation.validation import filter_replies
from ntkfl.methods import NTKFL, ClientRound, Task
from ntkfl.methods.ntk_fl import CandidateLosses, candidates_question, unpack_candidates
from ntkfl.models import mlp
from ntkfl.privacy.randomness import Randomness
from ntkfl.tangent import PAPER_STEPS, Evolution, concatenate, evolve, jacobian
from ntkfl.tangent.losses import targets
from ntkfl.wire import Message
from ntkfl_experiments.bench.dense import DenseWay, explicit_steps
from ntkfl_experiments.bench.timing import BenchRow, Setting, fashion, race, relative, synthetic

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

    def method(self, kernel: str = "full") -> NTKFL:
        return NTKFL(lr=_LR, steps=self.steps, kernel=kernel, label_smoothing=0.0)

    def update(self) -> tuple[Evolution, Tensor]:
        """The flow, and all candidate changes of the weights, [S, d]."""
        evolution = evolve(self.J, self.f0, self.y, _LR, self.steps, rtol=self.method().tolerance)
        return evolution, evolution.deltas()

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
            received = [Message.decode(one) for one in sent]
            try:
                replies = filter_replies(method.replies[question.kind], task, received, Traffic())
                outgoing = conversation.send(replies)
            except StopIteration as end:
                new: Tensor = end.value.state["weights"]
                return new

    def score(self) -> object:
        """The candidates' losses: what a dense round pays as well."""
        question = candidates_question(1, self.task.like.expand(len(self.steps), -1))
        candidates = unpack_candidates(question, self.task.like)
        return [CandidateLosses.of(self.task, candidates, client) for client in self.clients]

    def descend(self, steps: tuple[int, ...], kernel: str = "full", rows: int | None = None) -> Evolution:
        """Explicit steps of gradient descent along the kernel, on the first `rows` samples."""
        J = self.J if rows is None else self.J[:rows]
        return evolve(J, self.f0[:rows], self.y[:rows], _LR, steps, kernel=kernel, scheme="descent")


def round(setting: Setting) -> list[BenchRow]:
    """A round of NTK-FL at the paper's size, and its server's update, against the dense way."""
    case = _Case(setting)
    timed = race(
        {
            "flow": case.update,
            "descent": lambda: case.descend((_SLICE,)),
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
    size = f"N={case.N:,} {case.data}, {case.side**2}-{case.hidden}-10; {flow.statistics.evaluations} products"
    few = (20, 20) if setting.quick else (200, 500)
    return [
        BenchRow("flow, full kernel", seconds["flow"], 1.0, note=size),
        BenchRow(
            f"{case.steps[-1]:,} explicit steps, full kernel",
            descent,
            descent / seconds["flow"],
            max(apart.values()),
            f"at the worst t ≥ {_COMPARED_FROM}; same operators; timed by {_SLICE} steps",
            apart,
        ),
        BenchRow(
            f"a whole round of {_CLIENTS} clients",
            seconds["round"],
            1.0,
            note=f"Jacobians, flow, {len(case.steps)} candidates scored, messages in bytes",
        ),
        _dense(setting, case, "full", few[0], seconds["round"], seconds["score"]),
        BenchRow("a whole round, the paper's trace kernel", seconds["trace round"], 1.0),
        _dense(setting, case, "trace", few[1], seconds["trace round"], seconds["score"]),
    ]


def _dense(setting: Setting, case: _Case, kernel: str, few: int, ours: float, score: float) -> BenchRow:
    """Dense Jacobian, dense kernel, explicit steps and weights, measured on `few` rows and scaled to all of them.

    Candidates are scored as ours are. Jacobian and weights grow with N, the kernel and its products with N². Small
    products run in a cache that large ones do not fit, so what is scaled is too good, if anything.
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
        relative(timed["weights"].result, case.descend(case.steps, kernel, few).deltas()),
        f"scaled from N={few}: Jacobian ×{growth:g}, kernel ×{growth**2:g}; would hold {held:.2g} GB",
        {f"{name}_seconds": part for name, part in parts.items()},
    )
