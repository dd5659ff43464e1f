"""Byzantine clients, for simulations alone: some clients corrupt what they reply, and that goes over the wire.

Which clients is drawn from the run's seed and stays the same for the whole run. A reply is corrupted where it is made:
servers, shufflers and defences meet it as they would meet a real one.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace

import numpy as np
import torch
from pydantic import Field

from ntkfl.errors import ConfigError, unknown
from ntkfl.federation.client import derive, honest
from ntkfl.methods import ClientRound, Method, Task
from ntkfl.methods.ntk_fl import TangentRows, pack
from ntkfl.methods.replies import WEIGHTS, Reply
from ntkfl.options import Options
from ntkfl.wire import Message

ATTACKS: Mapping[str, str] = {
    "wrong-labels": "samples of every class get the next one's label (label flipping)",
    "scaled-inputs": "inputs are `scale` times what they are",
    "sign-flip": "Jacobians, updates or gradients are −`scale` times the true ones",
}


class Byzantine(Options):
    """Which attack, by what part of all clients; several at once are joined by a plus."""

    kind: str = Field(description=", ".join(ATTACKS) + "; several as wrong-labels+scaled-inputs")
    fraction: float = Field(0.1, gt=0, lt=1, description="part of all clients that are Byzantine")
    scale: float = Field(1.0, gt=0, description="how far the corruption is scaled, where it is")

    def model_post_init(self, _: object) -> None:
        for kind in self.kinds - ATTACKS.keys():
            raise unknown("kind of attack", kind, ATTACKS)

    @property
    def kinds(self) -> frozenset[str]:
        """The attacks that are mounted together."""
        return frozenset(self.kind.split("+"))

    def check(self, method: Method) -> None:
        """`ConfigError` for a sign flip where no reply of the method has Jacobians or vectors to turn round."""
        able = any(issubclass(kind, TangentRows) or kind.vectors for kind in method.replies.values())
        if "sign-flip" in self.kinds and not able:
            raise ConfigError(f"clients of {method.name} have no way to mount 'sign-flip'")

    def drawn(self, seed: int, clients: int) -> frozenset[int]:
        """⌊fraction · clients + ½⌋ of the clients, at least one."""
        rng = np.random.Generator(np.random.PCG64(derive(seed, "poison")))
        count = max(1, int(self.fraction * clients + 0.5))
        return frozenset(map(int, rng.choice(clients, count, replace=False)))

    def reply(self, ids: Container[int], method: Method, task: Task, question: Message, client: ClientRound) -> Reply:
        """The client's reply, corrupted if it is one of `ids`."""
        if client.id not in ids:
            return honest(method, task, question, client)
        x, y = client.x, client.y
        if "wrong-labels" in self.kinds:
            y = -y if y.is_floating_point() else (y + 1) % task.outputs
        x = self.scale * x if "scaled-inputs" in self.kinds else x
        reply = honest(method, task, question, replace(client, x=x, y=y))
        return _turned(reply, task, question, self.scale) if "sign-flip" in self.kinds else reply


def _turned(reply: Reply, task: Task, question: Message, scale: float) -> Reply:
    """With Jacobians, updates or gradients v as −scale · v; an update's v is its change of the weights broadcast."""
    if isinstance(reply, TangentRows):
        reply.check(task)  # decodes the rows
        packed = pack(reply.J.scaled(torch.full((len(reply.J),), -scale)), task.privacy)
        return type(reply)(reply.arrays | packed, reply.halves)
    vectors = {}
    for name in reply.vectors:
        base = question.take(WEIGHTS, None, task.like) if name == WEIGHTS else torch.zeros_like(task.like)
        vectors[name] = base - scale * (reply.vector(name, task.like) - base)
    return reply.with_vectors(vectors)
