"""Poisoned clients, for simulations alone: some clients lie in what they answer, and the lie goes over the wire.

Who lies is drawn from the run's seed and stays the same for the whole run. A lie is made where the answer is: before it
is split, sealed and sent, so that servers, shufflers and defences meet it as they would meet a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import ConfigError, NumericalError, unknown
from ntkfl.federation.seeds import derive
from ntkfl.methods import ClientRound, Method, Task
from ntkfl.methods.batchnorm import answer
from ntkfl.methods.fedavg import LocalTraining
from ntkfl.methods.ntk_fl import NTKFL
from ntkfl.methods.qsgd import Compression
from ntkfl.methods.step_selection import OVERFLOW
from ntkfl.options import Options
from ntkfl.tangent.factored import FactoredBlock
from ntkfl.tangent.jacobian import Block, BlockJacobian
from ntkfl.tangent.sparse import SparseBlock
from ntkfl.wire import Message, pack_jacobian
from ntkfl.wire.topk import pack_topk

KINDS: Mapping[str, str] = {
    "wrong-labels": "samples of every class are called by the next one's name",
    "scaled-inputs": "inputs are `scale` times what they are",
    "scaled-outputs": "outputs are sent as `scale` times what they are (NTK-FL)",
    "flood": "samples are sent `scale` times over; through a shuffler, as often as fills a client's rows (NTK-FL)",
    "scaled-labels": "labels are sent as `scale` times what they are; of averaging methods, trained on so",
    "random": "Jacobians, or updates, are random, `scale` times as large as the true ones",
    "sign-flip": "Jacobians, or updates, are −`scale` times the true ones",
    "false-losses": "losses of candidates speak for the worst one alone (NTK-FL)",
    "shortest-flow": "losses of candidates speak for the first one alone (NTK-FL)",
    "longest-flow": "losses of candidates speak for the last one alone (NTK-FL)",
    "not-finite": "every number is NaN",
    "extreme": "every number is 1e30 times what it is",
}


_ABOUT_LOSSES = frozenset({"false-losses", "shortest-flow", "longest-flow"})


class Poison(Options):
    """Which lie, told by what part of all clients; several at once are joined by a plus."""

    kind: str = Field(description=", ".join(KINDS) + "; several as wrong-labels+flood")
    fraction: float = Field(0.1, gt=0, lt=1, description="part of all clients that lie")
    scale: float = Field(1.0, gt=0, description="how far the lie is scaled, where it is")

    def model_post_init(self, _: object) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise unknown("kind of poison", kind, KINDS)

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(self.kind.split("+"))

    def check(self, method: Method) -> None:
        """`ConfigError` for a lie that clients of this method have no way to tell."""
        if self.kinds & _ABOUT_LOSSES and not (isinstance(method, NTKFL) and method.choose == "cohort"):
            raise ConfigError(f"clients of {method.name} report no losses of candidates: another kind of poison")
        needs = self.kinds & {"random", "sign-flip", "scaled-labels"}
        if needs and not isinstance(method, NTKFL | LocalTraining):
            raise ConfigError(f"poison {self.kind!r} is not of {method.name}, whose clients send samples")
        if self.kinds & {"flood", "scaled-outputs"} and not isinstance(method, NTKFL):
            raise ConfigError(f"clients of {method.name} send no rows: poison {self.kind!r} is for NTK-FL")

    def liars(self, seed: int, clients: int) -> frozenset[int]:
        """⌊fraction · clients + ½⌋ of the clients, at least one."""
        rng = np.random.Generator(np.random.PCG64(derive(seed, "poison")))
        drawn = rng.choice(clients, max(1, int(self.fraction * clients + 0.5)), replace=False)
        return frozenset(int(i) for i in drawn)


@dataclass(frozen=True)
class ByzantineClients:
    """The clients of a run that lie, and how; through a shuffler every client sends `rows` rows of samples."""

    poison: Poison
    ids: frozenset[int]
    rows: int = 1

    @staticmethod
    def of(poison: Poison | None, method: Method, seed: int, clients: int, rows: int = 1) -> ByzantineClients | None:
        if poison is None:
            return None
        poison.check(method)
        return ByzantineClients(poison, poison.liars(seed, clients), rows)

    def among(self, cohort: Sequence[int]) -> list[int]:
        return [client for client in cohort if client in self.ids]

    def answer(self, method: Method, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        """Each client's reply; those of the liars are lies."""
        liars = [client.id in self.ids for client in clients]
        if not any(liars):
            return answer(method, task, message, clients)
        if "wrong-labels" in self.poison.kinds:
            clients = [_misnamed(c, task.outputs) if lies else c for c, lies in zip(clients, liars, strict=True)]
        if "scaled-inputs" in self.poison.kinds:
            s = self.poison.scale
            clients = [replace(c, x=s * c.x) if lies else c for c, lies in zip(clients, liars, strict=True)]
        if "scaled-labels" in self.poison.kinds and isinstance(method, LocalTraining):
            return self._apart(method, task, message, clients)
        if "flood" in self.poison.kinds:
            clients = [self._flooding(c, method) if lies else c for c, lies in zip(clients, liars, strict=True)]
        replies = answer(method, task, message, clients)
        return [
            self._lie(method, task, message, reply, client) if lies else reply
            for reply, client, lies in zip(replies, clients, liars, strict=True)
        ]

    def _flooding(self, client: ClientRound, method: Method) -> ClientRound:
        """The client with its samples over and over."""
        count = self.rows if method.shuffle else max(1, round(self.poison.scale * len(client)))
        rows = torch.arange(count, device=client.y.device) % len(client)
        return replace(client, x=client.x[rows], y=client.y[rows])

    def _apart(
        self, method: LocalTraining, task: Task, message: Message, clients: Sequence[ClientRound]
    ) -> list[Message]:
        """Cross-entropy is linear in its targets, so targets times s are the learning rate times s. A liar whose own
        training diverges sends what came of it: numbers that are not finite.
        """
        scaled = method.model_copy(update={"lr": method.lr * self.poison.scale})
        replies = []
        for client, honest in zip(clients, answer(method, task, message, clients), strict=True):
            if client.id in self.ids:
                try:
                    (honest,) = answer(scaled, task, message, [client])
                except NumericalError:
                    honest = _with_numbers(honest, lambda a: a * float("nan"))
            replies.append(honest)
        return replies

    def _lie(self, method: Method, task: Task, asked: Message, reply: Message, client: ClientRound) -> Message:
        for kind in sorted(self.poison.kinds):
            reply = self._changed(kind, method, task, asked, reply, client)
        return reply

    def _changed(
        self, kind: str, method: Method, task: Task, asked: Message, reply: Message, client: ClientRound
    ) -> Message:
        scale = self.poison.scale
        seed = client.randomness.seed("lies")  # nothing secret rests on what a simulated liar makes up
        if kind in ("not-finite", "extreme"):
            return _with_numbers(reply, lambda a: a * 1e30 if kind == "extreme" else a * float("nan"))
        if isinstance(method, NTKFL):
            if kind in _ABOUT_LOSSES and reply.kind == "losses":
                return _with_numbers(reply, lambda losses: _speaking_for(kind, losses))
            if reply.kind != "upload":
                return reply
            if kind == "scaled-labels":
                labels = torch.nn.functional.one_hot(client.y.cpu(), task.outputs) if client.y.ndim == 1 else client.y
                return replace(reply, arrays={**reply.arrays, "labels": scale * labels.to(task.like.dtype)})
            if kind == "scaled-outputs":
                return replace(reply, arrays={**reply.arrays, "outputs": scale * reply.arrays["outputs"]})
            if kind in ("random", "sign-flip"):
                draws = torch.Generator().manual_seed(seed + 1) if kind == "random" else None
                return _with_jacobian(method, task, reply, _change(kind, scale, seed), draws)
        elif isinstance(method, LocalTraining) and kind in ("random", "sign-flip") and reply.arrays:
            return _with_update(method, task, asked, reply, client, _change(kind, scale, seed))
        return reply


_Change = Callable[[Tensor], Tensor]


def _change(kind: str, scale: float, seed: int) -> _Change:
    """What becomes of rows [n, ...]: turned round, or random of the same norms; `scale` times as large."""
    if kind == "sign-flip":
        return lambda rows: -scale * rows
    draws = torch.Generator().manual_seed(seed)
    return lambda rows: scale * _random(rows, draws)


def _random(rows: Tensor, draws: torch.Generator) -> Tensor:
    noise: Tensor = torch.randn(rows.shape, generator=draws).to(rows)
    lengths: Tensor = rows.flatten(1).norm(dim=1) / noise.flatten(1).norm(dim=1)
    return noise * lengths.view(-1, *[1] * (rows.ndim - 1))


def _misnamed(client: ClientRound, classes: int) -> ClientRound:
    return replace(client, y=-client.y if client.y.is_floating_point() else (client.y + 1) % classes)


def _speaking_for(kind: str, losses: Tensor) -> Tensor:
    """No loss for one candidate, and for the others one that overflowed: [..., S]."""
    worst = int(losses.reshape(-1, losses.shape[-1]).sum(0).argmax())
    lie = torch.full_like(losses, OVERFLOW)
    lie[..., {"shortest-flow": 0, "longest-flow": -1}.get(kind, worst)] = 0
    return lie


def _with_numbers(reply: Message, change: _Change) -> Message:
    return replace(reply, arrays={n: change(a) if a.is_floating_point() else a for n, a in reply.arrays.items()})


def _with_jacobian(
    method: NTKFL, task: Task, reply: Message, change: _Change, draws: torch.Generator | None
) -> Message:
    """The upload with another Jacobian. A factored row is changed in its sensitivities; with `draws`, what else there
    is of it (inputs; of sparse rows, positions) is random too.
    """
    J = method.read(task, reply)[0]
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
    lie = BlockJacobian(blocks, *J.shape[1:])
    packed = pack_topk(lie, method.values) if method.sparsity else pack_jacobian(lie)
    return replace(reply, arrays={**reply.arrays, **packed})


def _positions(like: Tensor, size: int, draws: torch.Generator) -> Tensor:
    """Other positions [n, k], increasing, below `size`."""
    n, k = like.shape
    drawn = torch.randint(size - k + 1, (n, k), generator=draws).sort(1).values
    return (drawn + torch.arange(k)).to(like)


def _with_update(
    method: LocalTraining, task: Task, asked: Message, reply: Message, client: ClientRound, change: _Change
) -> Message:
    """The update with other vectors: the change of the weights they bring is what changes."""
    arrays = dict(reply.arrays)
    if isinstance(method, Compression):
        vector = method.decompress(reply, task.like)
        arrays |= method.compress(change(vector.unsqueeze(0))[0], client)
    for name in method.vectors:
        base = asked.take("weights", None, task.like) if name == "weights" else torch.zeros_like(task.like)
        vector = method.take(reply, name, task.like, base)
        arrays |= method.pack(name, base + change((vector - base).unsqueeze(0))[0], base)
    return replace(reply, arrays=arrays)
