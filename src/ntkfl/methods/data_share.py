"""Data sharing. Zhao et al., Federated Learning with Non-IID Data, 2018.

The server holds a small set G of samples of all classes and gives it to each client, once; clients train as in FedAvg
on their own samples and these. The paper also tries random portions of G, and begins from a model trained on G:
`warm_steps`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.methods.base import ClientRound, Outcome, Outgoing, State, Task, check_finite, take_labels
from ntkfl.methods.fedavg import FedAvg
from ntkfl.methods.local_sgd import train_locally
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message, pack_labels

Batch = tuple[Tensor, Tensor]


class DataShare(FedAvg):
    """w ← Σ_m p_m w_m, with w_m trained on D_m ∪ G. Without a shared set it is FedAvg."""

    name: ClassVar[str] = "data-share"
    paper: ClassVar[str] = "Zhao et al. 2018"
    additive: ClassVar[bool] = False  # some clients are told more than others
    shared_fraction: ClassVar[float] = 0.1  # β, size of the shared set relative to all clients' samples

    warm_steps: int = Field(0, ge=0, description="gradient steps on the shared set before the first round")

    def start(self, task: Task, weights: Tensor) -> State:
        """`holders` are the ids of the clients that have been given it, ascending. Begins from `weights`
        trained on the shared set for `warm_steps`, by the local learning rate and batches.
        """
        if self.warm_steps and _has_shared(task):
            assert task.shared is not None
            server = ClientRound(-1, *task.shared, Randomness.simulated(0))  # its own samples: no client's secret
            result = train_locally(task, weights, [server], self.warm_steps, self.lr, self.batch_size)
            weights = check_finite(result.weights[0], "the model trained on the shared set")
        return super().start(task, weights) | {"holders": torch.empty(0, dtype=torch.int64)}

    def round(
        self, task: Task, state: State, round: int, cohort: Sequence[int]
    ) -> Generator[Outgoing, list[Message], Outcome]:
        holders = set(state["holders"].tolist())
        new = [client for client in cohort if client not in holders and _has_shared(task)]
        averaging = super().round(task, state, round, cohort)
        plain = next(averaging)
        assert isinstance(plain, Message)
        replies = yield self._outgoing(task, plain, cohort, new)
        try:
            averaging.send(replies)
        except StopIteration as end:
            outcome: Outcome = end.value
        outcome.state["holders"] = torch.tensor(sorted(holders.union(new)), dtype=torch.int64)
        return outcome

    def _outgoing(self, task: Task, plain: Message, cohort: Sequence[int], new: Sequence[int]) -> Outgoing:
        """The weights for all, and with them the shared samples for those that are new."""
        if not new:
            return plain
        assert task.shared is not None
        x, y = task.shared
        arrays = {"shared_x": x, "shared_labels": pack_labels(y, task.outputs)}
        whole = Message(plain.kind, plain.round, {**plain.arrays, **arrays})
        return whole if len(new) == len(cohort) else {c: whole if c in new else plain for c in cohort}

    def answer(self, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
        given: Batch | None = None
        if "shared_x" in message.arrays:
            given = message.take("shared_x", like=task.like), take_labels(message, "shared_labels", task.like)
        enlarged = []
        for client in clients:
            x, y = given if given is not None else self._kept(task, client)
            if x.shape[:1] != y.shape[:1] or x.shape[1:] != client.x.shape[1:] or y.shape[1:] != client.y.shape[1:]:
                raise MessageError(f"the shared samples are not of the kind that client {client.id} has")
            enlarged.append(replace(client, x=torch.cat([client.x, x]), y=torch.cat([client.y, y])))
        replies = super().answer(task, message, enlarged)
        if given is not None:
            for client in clients:
                self._keep(task, client, given)
        return replies

    def _keep(self, task: Task, client: ClientRound, given: Batch) -> None:
        """Where server and clients live in one process, a mark will do in place of a copy for every client."""
        if task.shared is not None and all(torch.equal(a, b.to(a)) for a, b in zip(given, task.shared, strict=True)):
            client.memory["shared"] = torch.tensor(True)
        else:
            client.memory["shared_x"], client.memory["shared_y"] = (part.clone() for part in given)

    def _kept(self, task: Task, client: ClientRound) -> Batch:
        """What the client was given in an earlier round; nothing, if it was not."""
        if "shared" in client.memory:
            assert task.shared is not None
            return task.shared
        if "shared_x" in client.memory:
            return client.memory["shared_x"].to(client.x), client.memory["shared_y"].to(client.y)
        return client.x[:0], client.y[:0]


def _has_shared(task: Task) -> bool:
    return task.shared is not None and len(task.shared[1]) > 0
