"""Byzantine clients, for simulations alone: some clients corrupt what they reply, and that goes over the wire.

Which clients is drawn from the run's seed and stays the same for the whole run. A reply is corrupted where it is made:
before it is split, sealed and sent, so that servers, shufflers and defences meet it as they would meet a real one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from pydantic import Field

from ntkfl.errors import ConfigError, unknown
from ntkfl.federation.seeds import derive
from ntkfl.methods import ClientRound, Method, Task
from ntkfl.methods.batchnorm import answer
from ntkfl.methods.corruption import with_numbers
from ntkfl.methods.inspection import Corruption
from ntkfl.options import Options
from ntkfl.wire import Message

KINDS: Mapping[str, str] = {
    "wrong-labels": "samples of every class are called by the next one's name",
    "scaled-inputs": "inputs are `scale` times what they are",
    "scaled-outputs": "outputs are sent as `scale` times what they are (NTK-FL)",
    "flood": "samples are sent `scale` times over; through a shuffler, as often as fills a client's rows (NTK-FL)",
    "scaled-labels": "labels are sent as `scale` times what they are; of averaging methods, trained on so",
    "random": "Jacobians, or updates, are random, `scale` times as large as the true ones",
    "sign-flip": "Jacobians, or updates, are −`scale` times the true ones",
    "false-losses": "losses of candidates favour the worst one alone (NTK-FL)",
    "shortest-flow": "losses of candidates favour the first one alone (NTK-FL)",
    "longest-flow": "losses of candidates favour the last one alone (NTK-FL)",
    "not-finite": "every number is NaN",
    "extreme": "every number is 1e30 times what it is",
}


_ANY = frozenset({"wrong-labels", "scaled-inputs", "not-finite", "extreme"})  # that clients of any method can mount


class Byzantine(Options):
    """Which attack, by what part of all clients; several at once are joined by a plus."""

    kind: str = Field(description=", ".join(KINDS) + "; several as wrong-labels+flood")
    fraction: float = Field(0.1, gt=0, lt=1, description="part of all clients that are Byzantine")
    scale: float = Field(1.0, gt=0, description="how far the corruption is scaled, where it is")

    def model_post_init(self, _: object) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise unknown("kind of attack", kind, KINDS)

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(self.kind.split("+"))

    def check(self, method: Method) -> None:
        """`ConfigError` for an attack that clients of this method have no way to mount."""
        for kind in sorted(self.kinds - _ANY - method.attacks):
            able = ", ".join(sorted(_ANY | method.attacks))
            raise ConfigError(f"clients of {method.name} have no way to mount {kind!r}: valid are {able}")

    def draw(self, seed: int, clients: int) -> frozenset[int]:
        """⌊fraction · clients + ½⌋ of the clients, at least one."""
        rng = np.random.Generator(np.random.PCG64(derive(seed, "poison")))
        drawn = rng.choice(clients, max(1, int(self.fraction * clients + 0.5)), replace=False)
        return frozenset(int(i) for i in drawn)


@dataclass(frozen=True)
class ByzantineClients:
    """The Byzantine clients of a run; through a shuffler every client sends `rows` rows of samples."""

    attack: Byzantine
    ids: frozenset[int]
    rows: int = 1

    @staticmethod
    def of(attack: Byzantine | None, method: Method, seed: int, clients: int, rows: int = 1) -> ByzantineClients | None:
        if attack is None:
            return None
        attack.check(method)
        return ByzantineClients(attack, attack.draw(seed, clients), rows)

    def among(self, cohort: Sequence[int]) -> list[int]:
        return [client for client in cohort if client in self.ids]

    def answer(self, method: Method, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        """Each client's reply; those of Byzantine clients corrupted."""
        clients = [self._with_wrong_data(c, method, task) if c.id in self.ids else c for c in clients]
        replies = answer(method, task, message, clients)
        return [
            self._corrupted(method, task, message, reply, client) if client.id in self.ids else reply
            for reply, client in zip(replies, clients, strict=True)
        ]

    def _with_wrong_data(self, client: ClientRound, method: Method, task: Task) -> ClientRound:
        x, y, kinds = client.x, client.y, self.attack.kinds
        if "wrong-labels" in kinds:
            y = -y if y.is_floating_point() else (y + 1) % task.outputs
        if "scaled-inputs" in kinds:
            x = self.attack.scale * x
        if "flood" in kinds:  # the client's samples over and over
            count = self.rows if method.shuffle else max(1, round(self.attack.scale * len(client)))
            over = torch.arange(count, device=y.device) % len(client)
            x, y = x[over], y[over]
        return replace(client, x=x, y=y)

    def _corrupted(self, method: Method, task: Task, asked: Message, reply: Message, client: ClientRound) -> Message:
        seed = client.randomness.seed("lies")  # nothing secret rests on what a simulated client makes up
        for kind in sorted(self.attack.kinds):
            if kind in ("not-finite", "extreme"):
                reply = with_numbers(reply, partial(torch.mul, other=1e30 if kind == "extreme" else math.nan))
            else:
                reply = method.corrupt(Corruption(kind, self.attack.scale, seed), task, asked, reply, client)
        return reply
