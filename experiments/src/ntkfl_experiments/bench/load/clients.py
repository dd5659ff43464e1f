"""Clients that load the services, all in one event loop; each has its own keys, credential and connections."""

from __future__ import annotations

import asyncio
import hashlib
import random
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from ntkfl.crypto.hpke import SEAL_BYTES, SealingKey, SigningKey
from ntkfl.crypto.row_frames import Announced, pack_rows, seal_rows
from ntkfl.errors import MessageError
from ntkfl.services.http.client import RETRY_STATUSES, retry_after
from ntkfl.services.http.signing import sign_request
from ntkfl.services.key_server.key_protocol import enrolment, open_run_secret
from ntkfl.services.shuffler.client_app import SEQUENCE_HEADER
from ntkfl.services.trusted_peers import TrustedPeers


@dataclass
class Tally:
    """What requests met: seconds until they were served, waiting included, and how often they were turned away."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    cut: int = 0  # connections that broke; the request was sent again

    @property
    def turned_away(self) -> int:
        """Told to retry later, and did."""
        return sum(self.statuses[status] for status in RETRY_STATUSES)

    def percentile(self, share: float) -> float:
        """The smallest time within which that share was served."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    def figures(self) -> dict[str, float]:
        return {
            "requests": len(self.seconds),
            "p50_ms": round(1e3 * self.percentile(0.5), 1),
            "p99_ms": round(1e3 * self.percentile(0.99), 1),
            "max_ms": round(1e3 * max(self.seconds, default=0.0), 1),
            "turned_away": self.turned_away,
            "cut": self.cut,
        }


class LoadClient:
    """One client. It repeats a request as `HttpClient` does: when the service says so, and where a connection broke."""

    def __init__(self, name: str, folder: Path, pins: TrustedPeers, context: ssl.SSLContext) -> None:
        self.name, self._pins = name, pins
        self._token = (folder / "token").read_text()
        self._sealing, self.signing = SealingKey.generate(), SigningKey.generate()
        self.credential = ""
        self._http = httpx.AsyncClient(verify=context, timeout=httpx.Timeout(120, connect=60), trust_env=False)
        self.sequence = 0

    async def ask(self, tally: Tally, method: str, url: str, body: bytes = b"", json: object = None) -> httpx.Response:
        pause, began = 0.1, time.perf_counter()
        while True:
            request = self._http.build_request(method, url, content=body or None, json=json)
            if self.credential:
                target = request.url.raw_path.decode()
                request.headers.update(sign_request(self.credential, self.signing, method, target, request.content))
            later = 0.0
            try:
                response = await self._http.send(request)
            except httpx.TransportError:
                tally.cut += 1
            else:
                tally.statuses[response.status_code] += 1
                if response.status_code not in RETRY_STATUSES:
                    tally.seconds.append(time.perf_counter() - began)
                    return response
                later = retry_after(response)
            await asyncio.sleep(max(pause, later) * random.uniform(1, 1.5))
            pause = min(2.0, 2 * pause)

    async def enrol(self, tally: Tally) -> bytes:
        """Enrol, and ρ as this client gets it."""
        pins = self._pins
        body = enrolment(self._token, pins.federation, self._sealing, self.signing)
        answer = (await self.ask(tally, "POST", f"{pins.key_server.url}/v1/enrol", json=body)).json()
        self.credential = str(answer["credential"])
        return await self.seed(tally)

    async def seed(self, tally: Tally) -> bytes:
        """ρ, asked for and opened."""
        pins = self._pins
        answer = (await self.ask(tally, "POST", f"{pins.key_server.url}/v1/runs/{pins.run}/seed")).json()
        signer = bytes.fromhex(pins.key_server.signing_key)
        return open_run_secret(answer, self._sealing, signer, pins.federation, pins.run, self.name).reveal()

    async def hello(self, tally: Tally) -> None:
        await self.ask(tally, "POST", f"{self._pins.shuffler.url}/v1/runs/{self._pins.run}/hello")

    async def next_announcement(self, tally: Tally) -> bytes:
        """Wait for it, as long as it takes."""
        url = f"{self._pins.shuffler.url}/v1/runs/{self._pins.run}/announcement"
        while True:
            response = await self.ask(tally, "GET", f"{url}?after={self.sequence}")
            if response.status_code == 200:
                self.sequence = int(response.headers[SEQUENCE_HEADER])
                return response.content

    async def upload(self, tally: Tally, frame: bytes) -> int:
        """The status of the answer."""
        url = f"{self._pins.shuffler.url}/v1/runs/{self._pins.run}/rows"
        return (await self.ask(tally, "POST", url, frame)).status_code

    async def close(self) -> None:
        await self._http.aclose()


async def side_by_side(most: int, jobs: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """All jobs, `most` at a time."""
    turn = asyncio.Semaphore(most)

    async def one(job: Callable[[], Awaitable[None]]) -> None:
        async with turn:
            await job()

    await asyncio.gather(*map(one, jobs))


def row(client: str, number: int, index: int, size: int) -> bytes:
    """A row's plaintext: whose it is, and bytes that follow from that, so that every one of them can be checked."""
    head = f"{client}/{number}/{index}|".encode()
    return (head + hashlib.shake_128(head).digest(size))[:size]


def frame(client: str, announced: Announced, rows: int, row_bytes: int, aggregator: bytes, pins: TrustedPeers) -> bytes:
    """A whole submission: `rows` sealed rows of `row_bytes` each."""
    plain = [row(client, announced.key.round, i, row_bytes - SEAL_BYTES) for i in range(rows)]
    return pack_rows(announced, seal_rows(plain, aggregator, pins.federation, pins.run, announced))


def owner(plain: bytes) -> tuple[str, int, int]:
    """Whose row it is; `MessageError` where a byte of it is not as that client sent it."""
    client, number, index = plain.partition(b"|")[0].decode().split("/")
    if plain != row(client, int(number), int(index), len(plain)):
        raise MessageError(f"row {index} of {client} was changed on its way")
    return client, int(number), int(index)
