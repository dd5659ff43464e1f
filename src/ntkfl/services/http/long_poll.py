"""How waiting clients learn of an announcement."""

from __future__ import annotations

import asyncio
import threading


class LongPollEvent:
    """Wakes those who wait for an announcement; each costs an entry in a list, not a thread."""

    def __init__(self) -> None:
        self._rung, self.closed, self._waiting = asyncio.Event(), False, 0

    def __len__(self) -> int:
        """How many wait."""
        return self._waiting

    async def wait(self, seconds: float) -> bool:
        """Whether it rang in that time. Nothing can be missed between a look and this: both are of one event loop."""
        self._waiting += 1
        try:
            async with asyncio.timeout(0 if self.closed else seconds):
                return await self._rung.wait()
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1

    def ring(self) -> None:
        self._rung.set()
        self._rung = asyncio.Event()

    async def close_after(self, stop: threading.Event) -> None:
        """Let nobody wait on once a stop is asked for, or it would take as long as they wait."""
        while not stop.is_set():
            await asyncio.sleep(0.1)
        self.closed = True
        self.ring()
