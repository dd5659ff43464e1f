"""Those who mean no good, beside the clients who do: what each tries, and how it is answered."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from ntkfl.services.http.signing import sign_request
from ntkfl.services.trusted_peers import TrustedPeers
from ntkfl_experiments.bench.load.clients import LoadClient

_PATIENCE_S = 150  # longer than any bound of the services
_DEAF_S = 100  # longer than an answer waits for its reader
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Hostile:
    """`count` connections at a time that misuse the shuffler; `met` counts (what was tried, how it ended)."""

    def __init__(self, pins: TrustedPeers, context: ssl.SSLContext, insider: LoadClient) -> None:
        parts = urlsplit(pins.shuffler.url)
        self._host, self._port, self._context = parts.hostname or "", parts.port or 443, context
        self._path, self._insider = f"/v1/runs/{pins.run}", insider
        self.met: Counter[tuple[str, str]] = Counter()
        self._tricks: dict[str, Callable[[], Awaitable[str]]] = {
            "says nothing": self._says_nothing,
            "shakes no hands": self._shakes_no_hands,
            "half a request": self._half_a_request,
            "a stranger's rows": self._stranger,
            "a body too large": self._too_large,
            "a body that never ends": self._never_ends,
            "does not read": self._does_not_read,
        }

    async def misbehave(self, number: int) -> None:
        """One trick after the other, for ever."""
        tricks = list(self._tricks.items())
        while True:
            what, how = tricks[number % len(tricks)]
            number += 1
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    self.met[what, await how()] += 1
            except TimeoutError:
                self.met[what, "held on to for too long"] += 1
            except (OSError, ssl.SSLError, asyncio.IncompleteReadError):
                self.met[what, "cut"] += 1
            await asyncio.sleep(0.2)

    async def _connect(self, tls: bool = True) -> Streams:
        return await asyncio.open_connection(self._host, self._port, ssl=self._context if tls else None)

    async def _ending(self, streams: Streams) -> str:
        """How the other side ends it: by an answer, or without one."""
        reader, writer = streams
        try:
            line = await reader.readline()
        finally:
            writer.transport.abort()
        return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"

    async def _says_nothing(self) -> str:
        return await self._ending(await self._connect())

    async def _shakes_no_hands(self) -> str:
        return await self._ending(await self._connect(tls=False))

    async def _half_a_request(self) -> str:
        streams = await self._connect()
        streams[1].write(b"POST /v1/ru")
        return await self._ending(streams)

    async def _stranger(self) -> str:
        streams = await self._connect()
        self._ask(streams, "POST", "/rows", 10**5, signed=False)
        streams[1].write(bytes(10**5))
        return await self._ending(streams)

    async def _too_large(self) -> str:
        streams = await self._connect()
        self._ask(streams, "POST", "/rows", 10**12)
        return await self._ending(streams)

    async def _never_ends(self) -> str:
        streams = await self._connect()
        self._ask(streams, "POST", "/rows", 10**4)
        async with asyncio.TaskGroup() as tasks:
            ending = tasks.create_task(self._ending(streams))
            while not ending.done():
                streams[1].write(b"x")
                await asyncio.wait([ending], timeout=1)
        return ending.result()

    async def _does_not_read(self) -> str:
        """Asks for forty announcements in one breath and takes none, for longer than anybody should wait for it."""
        reader, writer = await self._connect()
        try:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            for _ in range(40):
                self._ask((reader, writer), "GET", "/announcement?after=0", 0)
            await asyncio.sleep(_DEAF_S)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            while await reader.read(1 << 20):
                pass
        finally:
            writer.transport.abort()
        return "closed"

    def _ask(self, streams: Streams, method: str, path: str, length: int, signed: bool = True) -> None:
        client, target = self._insider, self._path + path
        headers = {"host": self._host, "content-length": str(length)} if length else {"host": self._host}
        if signed:
            headers |= sign_request(client.credential, client.signing, method, target, b"")
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        streams[1].write("\r\n".join(lines).encode() + b"\r\n\r\n")
