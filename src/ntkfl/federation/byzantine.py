"""Byzantine clients, for simulations alone: some clients corrupt what they reply, and that goes over the wire.

Which clients is drawn from the run's seed and stays the same for the whole run. A reply is corrupted where it is made:
before it is split, sealed and sent, so that servers, shufflers and defences meet it as they would meet a real one. What
an attack does depends on the kind of reply, whatever the method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import ConfigError, unknown
from ntkfl.federation.client import honest
from ntkfl.federation.seeds import derive
from ntkfl.methods import ClientRound, Method, Task
from ntkfl.methods.ntk_fl import CandidateLosses, TangentRows, pack
from ntkfl.methods.replies import WEIGHTS, Reply, Update
from ntkfl.options import Options
from ntkfl.tangent.factored import FactoredBlock
from ntkfl.tangent.jacobian import Block, BlockJacobian
from ntkfl.wire import Message

ATTACKS: Mapping[str, str] = {
    "wrong-labels": "samples of every class get the next one's label (label flipping)",
    "scaled-inputs": "inputs are `scale` times what they are",
    "flood": "rows and sums: samples are sent `scale` times over, or as fills a client's rows in a shuffler",
    "sign-flip": "Jacobians, updates or gradients are −`scale` times the true ones",
    "random": "updates or gradients are random, `scale` times as long as the true ones",
    "shortest-flow": "losses of candidates favour the first one alone",
    "longest-flow": "losses of candidates favour the last one alone",
}
_ANY = frozenset({"wrong-labels", "scaled-inputs"})
_FAVOURITE = {"shortest-flow": 0, "longest-flow": -1}
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
        able = _ANY.union(*map(_attacks_on, method.replies.values()))
        for kind in sorted(self.kinds - able):
            raise ConfigError(f"clients of {method.name} have no way to mount {kind!r}: {', '.join(sorted(able))}")


def _attacks_on(reply: type[Reply]) -> set[str]:
    """What clients that send such replies can mount, beside what clients of any method can."""
    if issubclass(reply, CandidateLosses):
        return {*_FAVOURITE}
    if issubclass(reply, TangentRows):
        return {"sign-flip", "flood"}
    if issubclass(reply, Update):
        return {"sign-flip", "random"}
    return {"sign-flip", "random", "flood"} if reply.vectors else set()


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
        for kind in sorted(self.attack.kinds):
            if kind in _FAVOURITE and isinstance(reply, CandidateLosses):
                reply = type(reply)({name: _favouring(kind, a) for name, a in reply.arrays.items()}, reply.halves)
            elif kind in ("sign-flip", "random"):
                seed = client.randomness.seed("lies")  # nothing secret rests on what a simulated client makes up
                draws = torch.Generator().manual_seed(seed) if kind == "random" else None
                reply = self._turned(reply, task, question, draws)
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

    def _turned(self, reply: Reply, task: Task, question: Message, draws: torch.Generator | None) -> Reply:
        """With Jacobians, updates or gradients v as −scale · v; with `draws`, updates and gradients as
        scale · ‖v‖ ξ/‖ξ‖, ξ Gaussian. An update's v is its change of the weights broadcast. The curvature of sums
        stays: more of it would shorten the step.
        """
        scale = self.attack.scale
        if isinstance(reply, TangentRows):
            reply.check(task)  # decodes the rows
            J = reply.J
            assert isinstance(J, BlockJacobian)
            turned = BlockJacobian([_turned_block(block, scale) for block in J.blocks], *J.shape[1:])
            return reply if draws else type(reply)(reply.arrays | pack(turned, task.privacy), reply.halves)
        vectors = {}
        for name in reply.vectors:
            base = question.take(WEIGHTS, None, task.like) if name == WEIGHTS else torch.zeros_like(task.like)
            v = reply.vector(name, task.like) - base
            noise = None if draws is None else torch.randn(v.shape, generator=draws).to(v)
            vectors[name] = base + (-scale * v if noise is None else scale * (v.norm() / noise.norm()) * noise)
        return reply.with_vectors(vectors)


def _turned_block(block: Block, scale: float) -> Block:
    """The block with its rows times −scale: of a factored one the sensitivities, of others the values."""
    tensors, turned = list(block.tensors()), int(isinstance(block, FactoredBlock))
    tensors[turned] = -scale * tensors[turned]
    return block.with_tensors(tuple(tensors))


def _favouring(kind: str, losses: Tensor) -> Tensor:
    """In place of losses [..., S]: none for the favourite candidate, and for the others one that overflowed."""
    if not losses.is_floating_point():
        return losses
    false = torch.full_like(losses, _OVERFLOWED)
    false[..., _FAVOURITE[kind]] = 0
    return false
