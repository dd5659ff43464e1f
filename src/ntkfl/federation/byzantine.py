"""Byzantine clients, for simulations alone: some clients corrupt what they reply, and that goes over the wire.

Which clients is drawn from the run's seed and stays the same for the whole run. A reply is corrupted where it is made:
before it is split, sealed and sent, so that servers, shufflers and defences meet it as they would meet a real one. What
an attack does depends on the kind of reply, whatever the method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from ntkfl.errors import ConfigError, NumericalError, unknown
from ntkfl.federation.client import honest
from ntkfl.federation.seeds import derive
from ntkfl.methods import ClientRound, Method, Task
from ntkfl.methods.replies import WEIGHTS, Reply, Update
from ntkfl.methods.rows.candidates import CandidateLosses
from ntkfl.methods.rows.upload import TangentRows, pack
from ntkfl.options import Options
from ntkfl.tangent import Jacobian
from ntkfl.tangent.factored import FactoredBlock
from ntkfl.tangent.jacobian import Block, BlockJacobian
from ntkfl.tangent.sparse import SparseBlock
from ntkfl.wire import Message

Change = Callable[[Tensor], Tensor]

ATTACKS: Mapping[str, str] = {
    "wrong-labels": "samples of every class get the next one's label (label flipping)",
    "scaled-inputs": "inputs are `scale` times what they are",
    "scaled-outputs": "rows: outputs are sent as `scale` times what they are",
    "flood": "rows and sums: samples are sent `scale` times over, or as fills a client's rows in a shuffler",
    "scaled-labels": "rows: labels are sent as `scale` times what they are; updates: trained on so",
    "random": "Jacobians, updates or gradients are random, `scale` times as large as the true ones",
    "sign-flip": "Jacobians, updates or gradients are −`scale` times the true ones",
    "false-losses": "losses of candidates favour the worst one alone",
    "shortest-flow": "losses of candidates favour the first one alone",
    "longest-flow": "losses of candidates favour the last one alone",
    "not-finite": "every number is NaN",
    "extreme": "every number is 1e30 times what it is",
}
_ANY = frozenset({"wrong-labels", "scaled-inputs", "not-finite", "extreme"})
_OF_LOSSES = frozenset({"false-losses", "shortest-flow", "longest-flow"})
_OVERFLOWED = 1e30  # what an honest client reports of a candidate that overflows


class Byzantine(Options):
    """Which attack, by what part of all clients; several at once are joined by a plus."""

    kind: str = Field(description=", ".join(ATTACKS) + "; several as wrong-labels+flood")
    fraction: float = Field(0.1, gt=0, lt=1, description="part of all clients that are Byzantine")
    scale: float = Field(1.0, gt=0, description="how far the corruption is scaled, where it is")

    def model_post_init(self, _: object) -> None:
        for kind in self.kinds:
            if kind not in ATTACKS:
                raise unknown("kind of attack", kind, ATTACKS)

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(self.kind.split("+"))

    def check(self, method: Method) -> None:
        """`ConfigError` for an attack that clients of this method have no way to mount."""
        able = _ANY.union(*(_attacks_on(reply) for reply in method.replies.values()))
        for kind in sorted(self.kinds - able):
            raise ConfigError(f"clients of {method.name} have no way to mount {kind!r}: {', '.join(sorted(able))}")


def _attacks_on(reply: type[Reply]) -> frozenset[str]:
    """What clients that send such replies can mount, beside what clients of any method can."""
    if issubclass(reply, CandidateLosses):
        return _OF_LOSSES
    if issubclass(reply, TangentRows):
        return frozenset({"random", "sign-flip", "scaled-labels", "scaled-outputs", "flood"})
    if issubclass(reply, Update):
        return frozenset({"random", "sign-flip", "scaled-labels"})
    return frozenset({"random", "sign-flip", "flood"} if reply.vectors else ())


@dataclass(frozen=True)
class ByzantineClients:
    """The Byzantine clients of a run; through a shuffler every client sends `rows` rows of samples."""

    attack: Byzantine
    ids: frozenset[int]
    rows: int = 1

    @staticmethod
    def of(attack: Byzantine | None, method: Method, seed: int, clients: int, rows: int = 1) -> ByzantineClients | None:
        """⌊fraction · clients + ½⌋ of the clients, at least one."""
        if attack is None:
            return None
        attack.check(method)
        rng = np.random.Generator(np.random.PCG64(derive(seed, "poison")))
        count = max(1, int(attack.fraction * clients + 0.5))
        return ByzantineClients(attack, frozenset(map(int, rng.choice(clients, count, replace=False))), rows)

    def among(self, cohort: Sequence[int]) -> list[int]:
        return [client for client in cohort if client in self.ids]

    def answer(self, method: Method, task: Task, question: Message, client: ClientRound) -> Reply:
        """The client's reply, corrupted where it is a Byzantine one's."""
        if client.id not in self.ids:
            return honest(method, task, question, client)
        cheating = self._with_wrong_data(client, task)
        reply = honest(method, task, question, cheating)
        seed = client.randomness.seed("lies")  # nothing secret rests on what a simulated client makes up
        for kind in sorted(self.attack.kinds):
            reply = self._corrupted(kind, seed, method, task, question, reply, cheating)
        return reply

    def _with_wrong_data(self, client: ClientRound, task: Task) -> ClientRound:
        x, y, kinds = client.x, client.y, self.attack.kinds
        if "wrong-labels" in kinds:
            y = -y if y.is_floating_point() else (y + 1) % task.outputs
        if "scaled-inputs" in kinds:
            x = self.attack.scale * x
        if "flood" in kinds:  # the client's samples over and over
            count = self.rows if task.privacy.shuffle else max(1, round(self.attack.scale * len(client)))
            over = torch.arange(count, device=y.device) % len(client)
            x, y = x[over], y[over]
        return replace(client, x=x, y=y)

    def _corrupted(
        self, kind: str, seed: int, method: Method, task: Task, question: Message, reply: Reply, client: ClientRound
    ) -> Reply:
        scale = self.attack.scale
        if kind in ("not-finite", "extreme"):
            factor = 1e30 if kind == "extreme" else math.nan
            return _with_numbers(reply, lambda numbers: factor * numbers)
        if kind in _OF_LOSSES and isinstance(reply, CandidateLosses):
            return _with_numbers(reply, lambda losses: _favouring(kind, losses))
        if kind == "scaled-labels" and isinstance(reply, Update):
            return _trained_on_scaled_labels(scale, method, task, question, reply, client)
        if kind == "scaled-labels" and isinstance(reply, TangentRows):
            y = nn.functional.one_hot(client.y.cpu(), task.outputs) if client.y.ndim == 1 else client.y
            return type(reply)(reply.arrays | {"labels": scale * y.to(task.like.dtype)}, reply.halves)
        if kind == "scaled-outputs" and isinstance(reply, TangentRows):
            return type(reply)(reply.arrays | {"outputs": scale * reply.arrays["outputs"]}, reply.halves)
        if kind in ("random", "sign-flip"):
            return _turned(kind, scale, seed, task, question, reply)
        return reply


def _turned(kind: str, scale: float, seed: int, task: Task, question: Message, reply: Reply) -> Reply:
    """With Jacobians, updates or gradients turned round, or random of the same norms; `scale` times as large. An
    update's weights are changed from those broadcast. The curvature of sums stays: more of it would shorten the step.
    """
    draws = torch.Generator().manual_seed(seed)

    def change(rows: Tensor) -> Tensor:
        return -scale * rows if kind == "sign-flip" else scale * _random(rows, draws)

    if isinstance(reply, TangentRows):
        positions = torch.Generator().manual_seed(seed + 1) if kind == "random" else None
        reply.check(task)
        J = corrupted_jacobian(reply.J, change, positions)
        return type(reply)(reply.arrays | pack(J, task.privacy), reply.halves)
    vectors = {}
    for name in reply.vectors:
        base = question.take(WEIGHTS, None, task.like) if name == WEIGHTS else torch.zeros_like(task.like)
        vectors[name] = base + change((reply.vector(name, task.like) - base).unsqueeze(0))[0]
    return reply.with_vectors(vectors)


def _trained_on_scaled_labels(
    scale: float, method: Method, task: Task, question: Message, reply: Reply, client: ClientRound
) -> Reply:
    """Cross-entropy is linear in its targets, so targets times s are the learning rate times s. A client whose training
    diverges sends what came of it: numbers that are not finite.
    """
    if not hasattr(method, "lr"):
        return reply
    scaled = method.model_copy(update={"lr": method.lr * scale})
    try:
        return honest(scaled, task, question, client)
    except NumericalError:
        return _with_numbers(reply, lambda numbers: math.nan * numbers)


def _with_numbers(reply: Reply, change: Change) -> Reply:
    """The reply with all its real numbers changed."""
    arrays = {name: change(a) if a.is_floating_point() else a for name, a in reply.arrays.items()}
    return type(reply)(arrays, reply.halves)


def _favouring(attack: str, losses: Tensor) -> Tensor:
    """What a Byzantine client reports in place of losses [..., S]: none for one candidate (the worst, the first or the
    last, by the kind of attack), and for the others one that overflowed.
    """
    worst = int(losses.reshape(-1, losses.shape[-1]).sum(0).argmax())
    false = torch.full_like(losses, _OVERFLOWED)
    false[..., {"shortest-flow": 0, "longest-flow": -1}.get(attack, worst)] = 0
    return false


def corrupted_jacobian(J: Jacobian, change: Change, draws: torch.Generator | None) -> Jacobian:
    """J with its rows changed. A factored row is changed in its sensitivities; with `draws`, what else there is of it
    (inputs; of sparse rows, positions) is random too.
    """
    assert isinstance(J, BlockJacobian)
    blocks: list[Block] = []
    for block in J.blocks:
        if isinstance(block, SparseBlock):
            size = block.outputs * block.columns
            positions = block.positions if draws is None else _positions(block.positions, size, draws)
            blocks.append(block.with_tensors((change(block.values), positions)))
        elif isinstance(block, FactoredBlock):
            inputs = block.a if draws is None or not block.a.is_floating_point() else _random(block.a, draws)
            blocks.append(block.with_tensors((inputs, change(block.g))))
        else:
            blocks.append(block.with_tensors(tuple(change(t) for t in block.tensors())))
    return BlockJacobian(blocks, *J.shape[1:])


def _random(rows: Tensor, draws: torch.Generator) -> Tensor:
    """Of the same norms as rows [n, ...]."""
    noise: Tensor = torch.randn(rows.shape, generator=draws).to(rows)
    lengths: Tensor = rows.flatten(1).norm(dim=1) / noise.flatten(1).norm(dim=1)
    return noise * lengths.view(-1, *[1] * (rows.ndim - 1))


def _positions(like: Tensor, size: int, draws: torch.Generator) -> Tensor:
    """Other positions [n, k], increasing, below `size`."""
    n, k = like.shape
    drawn = torch.randint(size - k + 1, (n, k), generator=draws).sort(1).values
    return (drawn + torch.arange(k)).to(like)
