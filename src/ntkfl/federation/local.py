"""Clients in this process. Every message is encoded, counted and decoded, as if it crossed a network."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ntkfl.data import Federated
from ntkfl.errors import ConfigError
from ntkfl.federation.byzantine import ByzantineClients
from ntkfl.federation.client import Answer, Batch, Client, LatestMemory, Memory, SeededRandomness
from ntkfl.federation.feature_cache import FeatureCache
from ntkfl.federation.transcript import Transcript, TranscriptRecorder
from ntkfl.federation.transport import Traffic, Transport
from ntkfl.methods import ClientRound, Method, State, Task
from ntkfl.methods.base import Outgoing
from ntkfl.methods.batchnorm import answer
from ntkfl.privacy.projection import RunSecret
from ntkfl.privacy.subsample import equal_rows
from ntkfl.wire import Message

_MOMENTS = "moments"


class SimulatedClients:
    """The clients of `fed`, drawing from `seed`. Each sends `rows` rows of samples through a shuffler."""

    def __init__(
        self,
        fed: Federated,
        task: Task,
        method: Method,
        seed: int,
        secret: RunSecret | None = None,
        respond: Answer = answer,
        memory: Callable[[int], Memory] = lambda number: LatestMemory(),
        features: FeatureCache | None = None,
    ) -> None:
        self.fed, self.task, self.method, self.seed, self.features = fed, task, method, seed, features
        self.respond, self._memory = respond, memory
        self.secret = secret or RunSecret.simulated(seed)
        self.projection = method.make_projection(self.secret, fed.input_shape)
        self.rows = equal_rows(fed.sizes, method.subsample_rate)
        self._clients: dict[int, Client] = {}

    def __len__(self) -> int:
        return len(self.fed)

    def __getitem__(self, number: int) -> Client:
        if number not in self._clients:
            self._clients[number] = Client(
                number,
                self.task,
                self.method,
                lambda: self.place(self.fed.client(number)),
                SeededRandomness(self.seed, number),
                memory=self._memory(number),
                rows=self.rows if self.method.shuffle and self.method.sampled else None,
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
        return (
            x if self.features is None else self.features(x),
            y.to(like.device, like.dtype if y.is_floating_point() else y.dtype),
        )

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


def through_bytes(answers: list[Message]) -> list[tuple[Message, int]]:
    """Each answer after its way through bytes, and how many they were. Answers are let go as they are sent, since
    uploads are large.
    """
    sent = []
    while answers:
        payload = answers.pop(0).encode()
        sent.append((Message.decode(payload), len(payload)))
    return sent


class LocalTransport(Transport):
    """To the clients of this process, all of which can be asked."""

    def __init__(self, clients: SimulatedClients, byzantine: ByzantineClients | None = None) -> None:
        self.clients, self.byzantine = clients, byzantine
        self._standardized = clients.fed.standardization is None  # or what it took counts in round 1
        self.record((), lambda transcript: None)
        self._round, self._rounds = 0, dict[int, ClientRound]()
        self._recorder: TranscriptRecorder | None = None

    def record(self, rounds: Collection[int], on_transcript: Callable[[Transcript], None]) -> None:
        """Tell `on_transcript` every message of these rounds."""
        self._recorded, self._on_transcript = frozenset(rounds), on_transcript

    def available(self, wanted: int) -> Sequence[int]:
        return range(len(self.clients))

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        self._round, self._rounds = round, {number: self.clients[number].at(round) for number in cohort}
        self._recorder = TranscriptRecorder(round, cohort) if round in self._recorded else None

    def exchange(self, message: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[Message]:
        began = time.perf_counter()
        if self._round == 1 and not self._standardized:
            self._count_moments(traffic)
        if isinstance(message, Message):
            answers = self._ask(message, cohort, traffic)
        else:
            answers = [reply for number in cohort for reply in self._ask(message[number], [number], traffic)]
        for number in cohort:
            self.clients[number].memory.keep(self._round, self._rounds[number].memory)
        traffic.client_seconds += time.perf_counter() - began
        if self._recorder:
            answers = [reply.here() for reply in answers]
            self._recorder.asked(self.clients.method, message, answers)
        replies = []
        for reply, size in through_bytes(answers):
            replies.append(reply)
            traffic.uplink[reply.kind] += size
        return replies

    def _count_moments(self, traffic: Traffic) -> None:
        """What standardising inputs took: moments from every client, and mean and std back."""
        moments, self._standardized = self.clients.fed.standardization, True
        assert moments is not None
        told = {"samples": moments.samples, "sums": moments.sums, "squares": moments.squares}
        heard = {"mean": moments.mean, "std": moments.std}
        traffic.uplink[_MOMENTS] += len(Message("update", 0, told).encode()) * len(self.clients)
        traffic.downlink[_MOMENTS] += len(Message("weights", 0, heard).encode()) * len(self.clients)

    def _ask(self, message: Message, cohort: Sequence[int], traffic: Traffic) -> list[Message]:
        payload = message.encode()
        traffic.downlink[message.kind] += len(payload) * len(cohort)
        # All clients receive the same bytes, so decoding them once stands for each client's own decoding.
        rounds = [self._rounds[number] for number in cohort]
        return self.clients.respond(self.clients.method, self.clients.task, Message.decode(payload), rounds)

    def accepted(self, replies: Sequence[Message]) -> None:
        if self._recorder:
            self._recorder.answered(self.clients.method, replies)

    def end(self, completed: bool) -> None:
        if self._recorder and completed:
            self._on_transcript(self._recorder.transcript())
        for number in self._rounds:
            self.clients[number].rest()
        self._rounds, self._recorder = {}, None

    def notes(self, cohort: Sequence[int]) -> dict[str, Any]:
        return {} if self.byzantine is None else {"byzantine": self.byzantine.among(cohort)}

    def checkpoint(self) -> State:
        return self.clients.memories()

    def restore(self, tensors: State) -> None:
        self.clients.restore(tensors)
