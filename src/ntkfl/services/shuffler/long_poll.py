"""Long polling: how waiting clients learn of an announcement."""

from __future__ import annotations

import asyncio
import threading


class LongPollEvent:
    """Wakes all requests that wait for an announcement; each costs an entry in a list, not a thread."""

    def __init__(self) -> None:
        self._event, self.closed = asyncio.Event(), False

    async def wait(self, seconds: float) -> bool:
        """Whether `notify` was called in that time. A caller that looked for an announcement just before cannot miss
        one: both are of one event loop.
        """
        try:
            async with asyncio.timeout(0 if self.closed else seconds):
                return await self._event.wait()
        except TimeoutError:
            return False

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def close_after(self, stop: threading.Event) -> None:
        """End all waits once a stop is asked for, so that it need not wait for them."""
        while not stop.is_set():
            await asyncio.sleep(0.1)
        self.closed = True
        self.notify()
