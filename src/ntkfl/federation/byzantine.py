"""Byzantine clients, for simulations alone: some clients corrupt what they reply, and that goes over the wire.

Which clients is drawn from the run's seed and stays the same for the whole run. A reply is corrupted where it is made:
before it is split, sealed and sent, so that servers, shufflers and defences meet it as they would meet a real one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from ntkfl.federation.config import Byzantine
from ntkfl.federation.seeds import derive
from ntkfl.methods import ClientRound, Method, Task
from ntkfl.methods.batchnorm import answer
from ntkfl.methods.corruption import with_numbers
from ntkfl.methods.inspection import Corruption
from ntkfl.wire import Message


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
