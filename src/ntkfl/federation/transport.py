"""Between the server and its clients: what every way of reaching them offers, and the clients of this process.

A transport takes one question of the server to the clients of a cohort and brings their replies, wherever the clients
are: in this process (`LocalTransport`), behind a shuffler (`shuffled.py`), on Flower's nodes (`ntkfl.flower`).
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ntkfl.data import Federated
from ntkfl.errors import ConfigError
from ntkfl.federation.client import Answer, Batch, Client, FeatureCache, from_system, honest, seeded
from ntkfl.methods import Method, State, Task
from ntkfl.methods.base import Outgoing
from ntkfl.privacy.projection import RunSecret
from ntkfl.privacy.subsample import equal_rows
from ntkfl.wire import Message

FORGOTTEN = "forgotten"  # of a checkpoint: clients that `forget` took out


@dataclass
class Traffic:
    """What one round sent and lost."""

    uplink: Counter[str] = field(default_factory=Counter)  # bytes by kind of message
    downlink: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)  # rows, or clients' replies, by reason
    reasons: dict[str, str] = field(default_factory=dict)  # the first error in full, by reason
    rejected_clients: int = 0  # whose replies lost rows, where senders are known
    repeated: int = 0  # shuffled rows that equal others
    client_seconds: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)  # clients that did not answer, and why

    def reject(self, reason: str, rows: int, why: str) -> None:
        """Count rows that are left out. Of each reason the first `why` is kept, as a log has room for one."""
        self.rejected[reason] += rows
        self.reasons.setdefault(reason, why)


class Transport:
    """A round is `begin`, one or more `exchange`s, and `end`. Clients are numbers."""

    anonymous: bool = False  # whether replies come without their senders
    floor: int | None = None  # fewest clients whose replies are released, where a shuffler sees to that

    @abstractmethod
    def available(self) -> Sequence[int]:
        """Clients that can be asked now, ascending; `TooFew` where there are not as many as there must be."""

    @abstractmethod
    def exchange(self, question: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[Message]:
        """Replies ordered by client, or anonymous ones; counts bytes, and who failed. A client that failed in one
        exchange of a round is not asked in the next.
        """

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        """A round with these clients begins."""

    def end(self) -> None:
        """The round is over."""

    def notes(self, cohort: Sequence[int]) -> dict[str, Any]:
        """What the round's record says beyond what every record does."""
        return {}

    def checkpoint(self) -> State:
        """What clients in this process keep between rounds."""
        return {}

    def restore(self, tensors: State) -> None:
        """Go on from a checkpoint, which may hold more than is ours."""


class LocalTransport(Transport):
    """To the clients of `fed`, in this process. Every message is encoded, counted and decoded, as if it crossed a
    network.

    Clients draw from `seed`, or where not `repeatable` from the operating system. Each sends `rows` rows of samples
    through a shuffler. `features` is the cache of a frozen backbone; `respond` is how clients answer, and `byzantine`
    are those that cheat.
    """

    def __init__(
        self,
        fed: Federated,
        task: Task,
        method: Method,
        seed: int,
        *,
        repeatable: bool = True,
        features: FeatureCache | None = None,
    ) -> None:
        self.fed, self.task, self.method, self.seed = fed, task, method, seed
        self.repeatable, self.features = repeatable, features
        self.respond: Answer = honest
        self.byzantine: frozenset[int] | None = None
        self.forgotten: list[int] = []  # nobody asks them again
        self.secret = RunSecret.simulated(seed)
        self.projection = task.privacy.make_projection(self.secret, fed.input_shape)
        self.rows = equal_rows(fed.sizes, task.privacy.subsample_rate)
        self._clients: dict[int, Client] = {}
        self._cohort: Sequence[int] = ()
        self._standardizes = False  # whether what standardising took counts in the next exchange

    def __getitem__(self, number: int) -> Client:
        """Client `number`, made when it is first asked: of many clients few are in a short run."""
        if number not in self._clients:
            sampled = any(reply.sampled for reply in self.method.replies.values())
            self._clients[number] = Client(
                number,
                self.task,
                self.method,
                lambda: self.place(self.fed.client(number)),
                seeded(self.seed, number) if self.repeatable else from_system,
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

    def available(self) -> Sequence[int]:
        """All but forgotten ones: simulated clients never sleep."""
        return [client for client in range(len(self.fed)) if client not in self.forgotten]

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        self._cohort = cohort
        to = self.fed.standardization
        self._standardizes = round == 1 and to is not None and not to.public

    def exchange(self, question: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[Message]:
        """One client after another, in this thread: results do not depend on how many cores there are."""
        began, received = time.perf_counter(), list[Message]()
        if self._standardizes:
            self._count_moments(traffic)
        # All clients receive the same bytes, unless each has a question of its own: decoding once stands for all.
        common = _crossed(question) if isinstance(question, Message) else None
        for number in cohort:
            asked, sent = common or _crossed(question[number])  # type: ignore[index]  # one for each
            traffic.downlink[asked.kind] += sent
            reply = self[number].answer(asked)
            answer, sent = _crossed(reply)
            traffic.uplink[reply.kind] += sent
            received.append(answer)
        traffic.client_seconds += time.perf_counter() - began
        return received

    def _count_moments(self, traffic: Traffic) -> None:
        """What standardising inputs took: moments from every client, and mean and std back."""
        assert self.fed.standardization is not None
        self._standardizes, numbers = False, torch.tensor(self.fed.standardization.mean, dtype=torch.float64)
        sums = {"samples": numbers[0], "sums": numbers, "squares": numbers}  # sizes count, not values
        back = {"mean": numbers, "std": numbers}
        traffic.uplink["moments"] += len(Message("sums", 0, sums).encode()) * len(self.fed)
        traffic.downlink["moments"] += len(Message("weights", 0, back).encode()) * len(self.fed)

    def end(self) -> None:
        """Let go of the cohort's samples: memory stays that of one round, however many clients there are."""
        for number in self._cohort:
            self[number].rest()
        self._cohort = ()

    def notes(self, cohort: Sequence[int]) -> dict[str, Any]:
        """Which of the cohort were Byzantine, where some clients are; and who was forgotten, and is in no cohort."""
        cheated = {} if self.byzantine is None else {"byzantine": [c for c in cohort if c in self.byzantine]}
        return cheated | ({"forgotten": self.forgotten} if self.forgotten else {})

    def checkpoint(self) -> State:
        """What clients keep between rounds, and who was forgotten."""
        kept = {number: client.memory for number, client in self._clients.items()}
        memories = {f"client/{number}/{name}": t for number, memory in kept.items() for name, t in memory.items()}
        return memories | ({FORGOTTEN: torch.tensor(self.forgotten)} if self.forgotten else {})

    def restore(self, tensors: State) -> None:
        """Give clients back what `checkpoint` took, and take in who was forgotten since."""
        self.forgotten = [int(client) for client in tensors.get(FORGOTTEN, ())]
        for key, t in tensors.items():
            if key.startswith("client/"):
                _, number, name = key.split("/", 2)
                self[int(number)].memory[name] = t.to(self.task.like.device)


def _crossed(message: Message) -> tuple[Message, int]:
    """The message as it arrives, and its bytes."""
    payload = message.encode()
    return Message.decode(payload), len(payload)
