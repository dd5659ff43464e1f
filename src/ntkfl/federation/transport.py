"""Between the server and its clients: what every way of reaching them offers, and what it counts.

A transport takes one question of the server to the clients of a cohort and brings their replies, wherever the clients
are: in this process (`local.py`), behind a shuffler (`shuffled.py`), on Flower's nodes (`ntkfl.flower`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ntkfl.methods import State
from ntkfl.methods.base import Outgoing
from ntkfl.methods.replies import Reply
from ntkfl.wire import Message


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


class Transport:
    """A round is `begin`, one or more `exchange`s, and `end`. Clients are numbers here; `name` is what records say."""

    anonymous: bool = False  # whether replies come without their senders
    floor: int | None = None  # fewest clients whose replies are released, where somebody in between sees to that

    @abstractmethod
    def available(self, wanted: int) -> Sequence[int]:
        """Clients that can be asked now, ascending; `TooFew` where those wanted do not come."""

    @abstractmethod
    def exchange(self, question: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[Message]:
        """Replies ordered by client, or anonymous ones; counts bytes, and who failed. A client that failed in one
        exchange of a round is not asked in the next.
        """

    def name(self, client: int) -> int | str:
        return client

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        """A round with these clients begins."""

    def accepted(self, replies: Sequence[Reply]) -> None:
        """What validation left of an exchange's replies."""

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
