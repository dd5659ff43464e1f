"""One client, wherever it runs: it draws a round's samples, answers what the server asks, and keeps its memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from ntkfl.errors import ConfigError
from ntkfl.federation.seeds import derive
from ntkfl.methods import ClientRound, Method, State, Task
from ntkfl.methods.replies import Reply
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.subsample import subsample
from ntkfl.wire import Message

Batch = tuple[Tensor, Tensor]
Answer = Callable[[Method, Task, Message, ClientRound], Reply]


class ClientRandomness(Protocol):
    """What one client draws in a round."""

    def subsampling(self, round: int) -> random.Random: ...

    def of_round(self, round: int) -> Randomness:
        """For all of the round: ask once, and keep it until the round ends."""


class SeededRandomness:
    """From a root seed and the client's number: repeats, and is no secret. How simulations draw."""

    def __init__(self, seed: int, client: int) -> None:
        self.seed, self.client = seed, client

    def subsampling(self, round: int) -> random.Random:
        return random.Random(derive(self.seed, "subsample", self.client, round))

    def of_round(self, round: int) -> Randomness:
        return Randomness.simulated(self.seed, "client", self.client, round)


class SystemRandomness:
    """From the operating system: nobody else can know, or make, this client's choices."""

    def subsampling(self, round: int) -> random.Random:
        return random.SystemRandom()

    def of_round(self, round: int) -> Randomness:
        return Randomness.fresh()


class Memory:
    """What a client keeps between rounds (SCAFFOLD's control variate, a share of common data): here, as it was last."""

    def __init__(self) -> None:
        self.state: State = {}

    def before(self, round: int) -> State:
        """As it was when this round began."""
        return dict(self.state)

    def keep(self, round: int, memory: State) -> None:
        """As it is after an answer of this round."""
        self.state = memory


def honest(method: Method, task: Task, question: Message, client: ClientRound) -> Reply:
    """The method's answer, if it is one that the method declares."""
    reply, kind = method.answer(task, question, client), method.replies.get(question.kind)
    if kind is None:
        raise ConfigError(f"{method.name}: `replies` must name a type for each question; {question.kind!r} has none")
    if not isinstance(reply, kind):
        raise ConfigError(f"{method.name}: `answer` must return a {kind.__name__}, not {reply!r:.80}")
    for name, array in reply.arrays.items():
        if not isinstance(array, Tensor):
            raise ConfigError(f"{method.name}: {name!r} in a reply must be a tensor, not {array!r:.60}")
    return reply


class Client:
    """Client `number`. `data` gives its samples as the network gets them, already projected; with `rows`, no more than
    that many are used in a round. `respond` is the method's answer, or that of a client that cheats.
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
        respond: Answer = honest,
    ) -> None:
        self.number, self.task, self.method, self.data = number, task, method, data
        self.randomness, self.memory, self.rows, self.respond = randomness, memory or Memory(), rows, respond
        self._at: int | None = None  # the round that `_client` is of
        self._client: ClientRound | None = None
        self._answered: set[str] = set()

    def at(self, round: int) -> ClientRound:
        """This client as it is in the round: its samples are drawn once."""
        if self._client is None or self._at != round:
            x, y = self.data()
            drawn = self.drawn(round, len(y))
            if len(drawn) < len(y):
                x, y = x[drawn.to(x.device)], y[drawn.to(y.device)]
            memory = self.memory.before(round)
            self._client = ClientRound(self.number, x, y, self.randomness.of_round(round), memory)
            self._at, self._answered = round, set()
        return self._client

    def drawn(self, round: int, samples: int) -> Tensor:
        """Which of its samples it uses in the round, int64 [n]."""
        return subsample(samples, self.task.privacy.subsample_rate, self.randomness.subsampling(round), self.rows)

    def answer(self, question: Message) -> Message:
        """The reply to a question of the server. One that comes again, as after the server's restart, finds the memory
        that the round began with.
        """
        client = self.at(question.round)
        if question.kind in self._answered:
            client = self._client = replace(client, memory=self.memory.before(question.round))
            self._answered = set()
        self._answered.add(question.kind)
        reply = self.respond(self.method, self.task, question, client)
        self.memory.keep(question.round, client.memory)
        return reply.message(question.round)

    def rest(self) -> None:
        """Let go of the round's samples."""
        self._at = self._client = None
