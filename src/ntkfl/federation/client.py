"""One client, wherever it runs: it draws a round's samples, answers what the server asks, and keeps its memory.

A simulation makes many of them in one process; a deployment one per machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from ntkfl.errors import DataError
from ntkfl.federation.evaluation import counts
from ntkfl.federation.seeds import derive
from ntkfl.methods import ClientRound, Method, State, Task
from ntkfl.methods.batchnorm import NAME, answer, load_statistics, statistics
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.subsample import subsample
from ntkfl.wire import Message

Batch = tuple[Tensor, Tensor]
Answer = Callable[[Method, Task, Message, Sequence[ClientRound]], list[Message]]


class ClientRandomness(Protocol):
    """What one client draws in a round."""

    def subsampling(self, round: int) -> random.Random: ...

    def of_round(self, round: int) -> Randomness:
        """For all of the round: ask once, and keep it until the round ends."""


class SystemRandomness:
    """From the operating system: nobody else can know, or make, this client's choices."""

    def subsampling(self, round: int) -> random.Random:
        return random.SystemRandom()

    def of_round(self, round: int) -> Randomness:
        return Randomness.fresh()


class SeededRandomness:
    """From a root seed and the client's number: repeats, and is no secret. How simulations draw."""

    def __init__(self, seed: int, client: int) -> None:
        self.seed, self.client = seed, client

    def subsampling(self, round: int) -> random.Random:
        return random.Random(derive(self.seed, "subsample", self.client, round))

    def of_round(self, round: int) -> Randomness:
        return Randomness.simulated(self.seed, "client", self.client, round)


class Memory(Protocol):
    """What a client keeps between rounds (SCAFFOLD's control variate, a share of common data)."""

    def before(self, round: int) -> State:
        """As it was when this round began."""

    def keep(self, round: int, memory: State) -> None:
        """As it is after an answer of this round."""


class LatestMemory:
    """In this process, as it was last."""

    def __init__(self, state: State | None = None) -> None:
        self.state: State = state or {}

    def before(self, round: int) -> State:
        return dict(self.state)

    def keep(self, round: int, memory: State) -> None:
        self.state = memory


class Client:
    """Client `number`. `data` gives its samples as the network gets them, already projected; with `rows`, no more than
    that many are used in a round. `respond` is the method's `answer`, or that of a client that cheats.
    """

    def __init__(
        self,
        number: int,
        task: Task,
        method: Method,
        data: Callable[[], Batch],
        randomness: ClientRandomness,
        *,
        memory: Memory | None = None,
        rows: int | None = None,
        respond: Answer = answer,
    ) -> None:
        self.number, self.task, self.method, self.data = number, task, method, data
        self.randomness, self.memory, self.rows, self.respond = randomness, memory or LatestMemory(), rows, respond
        self._at: Hashable = None  # the round and the attempt at it that `_round` is of
        self._round: ClientRound | None = None
        self._answered: set[str] = set()

    def at(self, round: int, attempt: Hashable = None) -> ClientRound:
        """This client as it is in the round: its samples are drawn once for each attempt at it."""
        if self._round is None or self._at != (round, attempt):
            x, y = self.data()
            drawn = self.drawn(round, len(y))
            if len(drawn) < len(y):
                x, y = x[drawn.to(x.device)], y[drawn.to(y.device)]
            memory = self.memory.before(round)
            self._round = ClientRound(self.number, x, y, self.randomness.of_round(round), memory)
            self._at, self._answered = (round, attempt), set()
        return self._round

    def drawn(self, round: int, samples: int) -> Tensor:
        """Which of its samples it uses in the round, int64 [n]."""
        return subsample(samples, self.method.subsample_rate, self.randomness.subsampling(round), self.rows)

    def answer(self, message: Message, attempt: Hashable = None) -> Message:
        """The reply to a message of the server. A question that comes again, as after the server's restart, finds the
        memory that the round began with.
        """
        client = self.at(message.round, attempt)
        if message.kind in self._answered:
            client = self._round = replace(client, memory=self.memory.before(message.round), statistics=None)
            self._answered = set()
        self._answered.add(message.kind)
        (reply,) = self.respond(self.method, self.task, message, [client])
        self.memory.keep(message.round, client.memory)
        return reply.here()

    def evaluate(self, message: Message) -> Message:
        """How well the weights in the message do on all of its samples, as counts."""
        own = statistics(self.task.model)
        if NAME in message.arrays and own:
            size = sum(value.numel() for value in own.values())
            load_statistics(self.task.model, message.take(NAME, (size,), self.task.like))
        return counts(self.task, message, *self.data())

    def rest(self) -> None:
        """Let go of the round's samples."""
        self._at = self._round = None


def check_data(x: Tensor, y: Tensor, inputs: tuple[int, ...], outputs: int) -> None:
    """`DataError` unless x is [n, *inputs], and y classes [n] below `outputs` or real [n, outputs]."""
    if len(x) == 0 or len(x) != len(y):
        raise DataError(f"{len(x)} inputs and {len(y)} labels: at least one, and as many of one as of the other")
    if tuple(x.shape[1:]) != inputs:
        raise DataError(f"inputs of shape {list(x.shape[1:])}; the run's terms say {list(inputs)}")
    if not bool(x.isfinite().all()):
        raise DataError("an input is not finite")
    if y.is_floating_point():
        if y.ndim != 2 or y.shape[1] != outputs or not bool(y.isfinite().all()):
            raise DataError(f"real targets must be finite and of shape [n, {outputs}], got {list(y.shape)}")
    elif y.ndim != 1 or not 0 <= int(y.min()) <= int(y.max()) < outputs:
        raise DataError(f"labels must be whole numbers from 0 to {outputs - 1}, one per sample")
