"""Between the server and its clients: what every way of reaching them offers, and what it counts.

A transport takes one message of the server to the clients of a cohort and brings their replies, wherever the clients
are: in this process (`local.py`), behind a shuffler (`shuffled.py`), on Flower's nodes (`ntkfl.flower`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ntkfl.methods import State
from ntkfl.methods.base import Outgoing
from ntkfl.wire import Message


@dataclass
class Traffic:
    """What one round sent: bytes by direction and kind of message; rows (of averaging methods, replies) rejected, by
    reason; replies that lost some, where their senders are known; shuffled rows that equal others; the seconds clients
    took; the clients that failed, with the reason; and, where clients may stay away (`heard`), how many were asked and
    answered, and the seconds that were waited for those that did not answer.
    """

    uplink: Counter[str] = field(default_factory=Counter)
    downlink: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    rejected_clients: int = 0
    repeated: int = 0
    client_seconds: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)
    asked: int = 0
    answered: int = 0
    waited_seconds: float = 0.0

    def heard(self, asked: int, answered: int, waited_seconds: float = 0.0) -> None:
        """Of one exchange. A client has answered the round when it has answered all of its exchanges."""
        self.answered = min(self.answered, answered) if self.asked else answered
        self.asked = max(self.asked, asked)
        self.waited_seconds += waited_seconds

    @property
    def dropped(self) -> int:
        return self.rejected.total()


class Transport:
    """A round is `begin`, one or more `exchange`s, perhaps an `evaluate`, and `end`. Clients are numbers here; `name`
    is what records call them.
    """

    quorum: int = 1  # replies, or where they are anonymous rows, below which a round is not built
    anonymous: bool = False  # whether replies come without their senders, and a round that they spoil is tried again
    floor: int | None = None  # clients below which nothing is released, where somebody in between sees to that

    def gather(self) -> None:
        """Before the first round: wait until the clients that are expected are there."""

    def available(self, wanted: int) -> Sequence[int]:
        """Clients that can be asked now, ascending; `TooFew` where those wanted do not come."""
        raise NotImplementedError

    def name(self, client: int) -> int | str:
        return client

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        """A round, or another attempt at it, begins with these clients."""

    def exchange(self, message: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[Message]:
        """Replies ordered by client, or anonymous ones; counts bytes, and who fails. A client that failed in one
        exchange of a round is not asked in the next.
        """
        raise NotImplementedError

    def evaluate(self, message: Message, cohort: Sequence[int]) -> list[Message]:
        """Counts of how well the weights in the message do, from those who can tell; `TooFew` where nobody does."""
        return self.exchange(message, cohort, Traffic())

    def accepted(self, replies: Sequence[Message]) -> None:
        """What was left of an exchange's replies after validation."""

    def end(self, completed: bool) -> None:
        """The round, or the attempt at it, is over."""

    def notes(self, cohort: Sequence[int]) -> dict[str, Any]:
        """What the round's record says beyond what every record does."""
        return {}

    def checkpoint(self) -> State:
        """What clients in this process keep between rounds."""
        return {}

    def restore(self, tensors: State) -> None:
        """Go on from a checkpoint, which may hold more than is ours."""

    def finish(self) -> None:
        """The run has ended."""
