"""Which clients are there: a dead one must not cost every round the wait for it.

A client has lapsed when it was asked in two batches that have ended, answered neither, and has not called since. It is
not waited for then, until it calls: every signed request is a call, and one that waits for announcements calls every 20
seconds. One that computes through so many batches is not waited for either, until it sends.

The aggregator is told which clients have lapsed only where the contract has rounds ask fewer than all clients: there it
draws, and could leave anybody out anyway. Where all are asked in every round, it cannot tell by a name whose rows, or
whose part of a sum, are missing.

This is held in memory. A shuffler that is started again takes everybody for present.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

_AFTER = 2  # batches


class Presence:
    """Of clients of whom `cohort` are asked in a round, by the contract; None: not known. Thread-safe."""

    def __init__(self, cohort: int | None = None) -> None:
        self._cohort, self._lock = cohort, threading.Lock()
        self._missed: dict[str, int] = {}  # batches since the client's last call
        self._newest = -1  # batch whose end was noted

    def called(self, client: str) -> None:
        """The client is there."""
        with self._lock:
            self._missed.pop(client, None)

    def missed(self, number: int, clients: Iterable[str]) -> None:
        """The batch of this number has ended without the answers of these; said again, it counts once."""
        with self._lock:
            if number > self._newest:
                self._newest = number
                for client in clients:
                    self._missed[client] = self._missed.get(client, 0) + 1

    def may_be_named(self, present: int) -> bool:
        """Whether the aggregator, of so many clients present, draws."""
        return self._cohort is not None and self._cohort < present

    def lapsed(self) -> frozenset[str]:
        with self._lock:
            return frozenset(client for client, missed in self._missed.items() if missed >= _AFTER)
