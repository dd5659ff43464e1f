"""Announcements on their way: how the aggregator hands one to the shuffler, and how waiting clients learn of it."""

from __future__ import annotations

import asyncio
import struct
import threading

from pydantic import TypeAdapter, ValidationError

from ntkfl.errors import MessageError, Refused
from ntkfl.privacy.shuffling import Batch

_LENGTH = struct.Struct("<I")
_TERMS = TypeAdapter(Batch)


def pack_announcement(signed: bytes, batch: Batch | None) -> bytes:
    """The body of `POST /announcements`: length of the terms (u32, little-endian; 0: none), terms (JSON), the rest."""
    terms = b"" if batch is None else _TERMS.dump_json(batch)
    return _LENGTH.pack(len(terms)) + terms + signed


def unpack_announcement(body: bytes) -> tuple[bytes, Batch | None]:
    """(the signed announcement, the batch it asks for); `Refused` for anything else."""
    end = _LENGTH.size + (_LENGTH.unpack_from(body)[0] if len(body) >= _LENGTH.size else 0)
    if len(body) <= end:
        raise Refused(422, "malformed", "an announcement is a length, terms of that length, and signed bytes")
    try:
        terms = body[_LENGTH.size : end]
        batch = _TERMS.validate_json(terms, strict=True) if terms else None
        if batch is not None:
            batch.key.check()
    except (ValidationError, MessageError):
        raise Refused(422, "terms", "the terms are not those of a batch") from None
    return body[end:], batch


class Bell:
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
