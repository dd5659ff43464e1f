"""Data sharing. Zhao et al., Federated Learning with Non-IID Data, 2018.

The server holds a small set G of samples of all classes and gives it to each client, once; clients train as in FedAvg
on their own samples and these. The paper also tries random portions of G, and begins from a model trained on G:
`warm_steps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.methods.averaging.fedavg import FedAvg
from ntkfl.methods.averaging.local_training import train_locally
from ntkfl.methods.base import Round
from ntkfl.methods.replies import Update
from ntkfl.methods.task import ClientRound, State, Task, check_finite, labels_of
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire.message import Message, pack_labels


class SharedUpdate(Update):
    """w_m as `weights`."""

    additive = False  # clients are asked different things: a secure sum is over replies to one question


class DataShare(FedAvg):
    """w ← Σ_m p_m w_m, with w_m trained on D_m ∪ G. Without a shared set it is FedAvg."""

    name = "data-share"
    replies = {"weights": SharedUpdate}
    shared_fraction: ClassVar[float] = 0.1  # β, size of the shared set relative to all clients' samples

    warm_steps: int = Field(0, ge=0, description="gradient steps on the shared set before the first round")

    def start(self, task: Task, weights: Tensor) -> State:
        """Begins from `weights` trained on the shared set for `warm_steps`, with the local learning rate and batches.
        `holders` are the ids of the clients that have been given the set, ascending.
        """
        if self.warm_steps and task.shared is not None:
            server = ClientRound(-1, *task.shared, Randomness.simulated(0))  # its own samples: no client's secret
            trained = train_locally(task, weights, server, self.warm_steps, self.lr, self.batch_size)
            weights = check_finite(trained.weights, "the model trained on the shared set")
        return super().start(task, weights) | {"holders": torch.empty(0, dtype=torch.int64)}

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """FedAvg's round; clients that have not been given G get it with the weights."""
        plain, holders = self.question(state, round), set(state["holders"].tolist())
        whole, given = plain, holders
        if task.shared is not None:
            (x, y), given = task.shared, holders.union(cohort)
            whole = self.question(state, round, shared_x=x, shared_labels=pack_labels(y, task.outputs))
        replies = yield {client: plain if client in holders else whole for client in cohort}
        p = self.shares(task, replies)
        new = self.combined(task, replies, p, "weights", state["weights"])
        told = torch.tensor(sorted(given), dtype=torch.int64)
        return self.outcome(replies, p, state | {"weights": new, "holders": told})

    def answer(self, task: Task, question: Message, client: ClientRound) -> Update:
        """w_m trained on the client's samples and G, which comes with the question the first time and is kept."""
        if "shared_x" in question.arrays:
            x, y = question.take("shared_x", like=task.like), labels_of(question.take("shared_labels"), task.like)
            if x.shape[:1] != y.shape[:1] or x.shape[1:] != client.x.shape[1:] or y.shape[1:] != client.y.shape[1:]:
                raise MessageError(f"the shared samples are not of the kind that client {client.id} has")
            # Where server and clients live in one process, a mark will do in place of a copy for every client.
            here = task.shared is not None
            client.memory |= {"shared": torch.tensor(True)} if here else {"shared_x": x.clone(), "shared_y": y.clone()}
        elif "shared" in client.memory and task.shared is not None:
            x, y = task.shared
        else:
            x, y = client.memory.get("shared_x", client.x[:0]), client.memory.get("shared_y", client.y[:0])
        together = torch.cat([client.x, x.to(client.x)]), torch.cat([client.y, y.to(client.y)])
        return super().answer(task, question, replace(client, x=together[0], y=together[1]))
