"""Clients in this process. Every message is encoded, counted and decoded, as if it crossed a network."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ntkfl.data import Federated
from ntkfl.errors import ConfigError
from ntkfl.federation.byzantine import ByzantineClients
from ntkfl.federation.client import Answer, Batch, Client, SeededRandomness, SystemRandomness, honest
from ntkfl.federation.feature_cache import FeatureCache
from ntkfl.federation.transport import Traffic, Transport
from ntkfl.methods import Method, State, Task
from ntkfl.methods.base import Outgoing
from ntkfl.methods.replies import Reply
from ntkfl.privacy.projection import RunSecret
from ntkfl.privacy.subsample import equal_rows
from ntkfl.wire import Message


class SimulatedClients:
    """The clients of `fed`, drawing from `seed`, or where not `repeatable` from the operating system. Each sends `rows`
    rows of samples through a shuffler.
    """

    repeatable = True

    def __init__(
        self,
        fed: Federated,
        task: Task,
        method: Method,
        seed: int,
        respond: Answer = honest,
        features: FeatureCache | None = None,
    ) -> None:
        self.fed, self.task, self.method, self.seed = fed, task, method, seed
        self.respond, self.features = respond, features
        self.secret = RunSecret.simulated(seed)
        self.projection = task.privacy.make_projection(self.secret, fed.input_shape)
        self.rows = equal_rows(fed.sizes, task.privacy.subsample_rate)
        self._clients: dict[int, Client] = {}

    def __len__(self) -> int:
        return len(self.fed)

    def __getitem__(self, number: int) -> Client:
        if number not in self._clients:
            sampled = any(reply.sampled for reply in self.method.replies.values())
            self._clients[number] = Client(
                number,
                self.task,
                self.method,
                lambda: self.place(self.fed.client(number)),
                SeededRandomness(self.seed, number) if self.repeatable else SystemRandomness(),
                rows=self.rows if self.task.privacy.shuffle and sampled else None,
                respond=self.respond,
            )
        return self._clients[number]

    def place(self, batch: Batch) -> Batch:
        """A batch as the network gets it: on the device, projected, behind a frozen backbone."""
        x, y, like = batch[0].to(self.task.like.device), batch[1], self.task.like
        if x.is_floating_point():  # tokens stay whole
            x = x.to(like.dtype)
        elif self.projection is not None:
            raise ConfigError("tokens cannot be projected: leave projected_dim out")
        x = x if self.projection is None else self.projection(x)
        x = x if self.features is None else self.features(x)
        return x, y.to(like.device, like.dtype if y.is_floating_point() else y.dtype)

    def memories(self) -> State:
        """What clients keep between rounds, as a checkpoint holds it."""
        kept = {number: client.memory.before(0) for number, client in self._clients.items()}
        return {f"client/{number}/{name}": t for number, memory in kept.items() for name, t in memory.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        memories: dict[int, State] = {}
        for key, t in tensors.items():
            if key.startswith("client/"):
                _, number, name = key.split("/", 2)
                memories.setdefault(int(number), {})[name] = t.to(self.task.like.device)
        for client, memory in memories.items():
            self[client].memory.keep(0, memory)


class Listener(Protocol):
    """Hears every message of a simulation, byte for byte, and who sent it: an audit scores its attacks by that."""

    def asked(self, question: Outgoing, cohort: Sequence[int]) -> None: ...
    def sent(self, client: int, message: Message) -> None: ...
    def answered(self, replies: Sequence[Reply]) -> None:
        """As the aggregator has them."""


class LocalTransport(Transport):
    """To the clients of this process, all of which can be asked."""

    listener: Listener | None = None

    def __init__(self, clients: SimulatedClients, byzantine: ByzantineClients | None = None) -> None:
        self.clients, self.byzantine = clients, byzantine
        self._standardized = clients.fed.standardization is None  # or what it took counts in the first exchange
        self._cohort: Sequence[int] = ()

    def available(self, wanted: int) -> Sequence[int]:
        return range(len(self.clients))

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        self._cohort = cohort
        self._standardized = self._standardized or round > 1

    def exchange(self, question: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[Message]:
        began, received = time.perf_counter(), list[Message]()
        if not self._standardized:
            self._count_moments(traffic)
        # All clients receive the same bytes, unless each has a question of its own: decoding once stands for all.
        asked = payload = None
        if isinstance(question, Message):
            payload = question.encode()
            asked = Message.decode(payload)
        if self.listener:
            self.listener.asked(question, cohort)
        for number in cohort:
            if not isinstance(question, Message):
                payload = question[number].encode()
                asked = Message.decode(payload)
            assert asked is not None
            assert payload is not None
            traffic.downlink[asked.kind] += len(payload)
            reply = self.clients[number].answer(asked)
            if self.listener:
                self.listener.sent(number, reply)
            answer = reply.encode()
            traffic.uplink[reply.kind] += len(answer)
            received.append(Message.decode(answer))
        traffic.client_seconds += time.perf_counter() - began
        return received

    def _count_moments(self, traffic: Traffic) -> None:
        """What standardising inputs took: moments from every client, and mean and std back."""
        moments, self._standardized = self.clients.fed.standardization, True
        assert moments is not None
        told = {"samples": moments.samples, "sums": moments.sums, "squares": moments.squares}
        heard = {"mean": moments.mean, "std": moments.std}
        traffic.uplink["moments"] += len(Message("sums", 0, told).encode()) * len(self.clients)
        traffic.downlink["moments"] += len(Message("weights", 0, heard).encode()) * len(self.clients)

    def accepted(self, replies: Sequence[Reply]) -> None:
        if self.listener:
            self.listener.answered(replies)

    def end(self) -> None:
        for number in self._cohort:
            self.clients[number].rest()
        self._cohort = ()

    def notes(self, cohort: Sequence[int]) -> dict[str, Any]:
        return {} if self.byzantine is None else {"byzantine": self.byzantine.among(cohort)}

    def checkpoint(self) -> State:
        return self.clients.memories()

    def restore(self, tensors: State) -> None:
        self.clients.restore(tensors)
