"""Requests are bounded in size, time and number, and logged without secrets: over TLS, and as the middleware alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ntkfl.services.http.application import service_app
from ntkfl.services.http.body_limits import Admit, BodyLimits
from ntkfl.services.http.signing import Unauthenticated
from tests.services.example_service import connection, error
from tests.services.processes import Process


def test_bodies_are_bounded_whether_or_not_their_size_is_said(client: httpx.Client) -> None:
    def pieces(size: int) -> Iterator[bytes]:
        yield from (bytes(1000) for _ in range(size // 1000))
        yield bytes(size % 1000)

    for size, fits in ((100_000, True), (100_001, False), (3_000_000, False)):
        for content in (bytes(size), pieces(size)):
            response = client.post("/size", content=content)
            if fits:
                assert response.json() == size
            else:
                assert error(response) == (413, "too-large")
                assert response.headers["connection"] == "close"
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("length", [str(10**12), "9" * 40])
def test_a_huge_size_is_refused_before_a_byte_is_sent(process: Process, folder: Path, length: str) -> None:
    with connection(process.urls["front"], folder) as raw:
        raw.sendall(f"POST /size HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode())
        assert raw.recv(1000).startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))


def test_a_body_that_does_not_arrive_is_a_408(process: Process, folder: Path) -> None:
    with connection(process.urls["front"], folder) as raw:
        raw.sendall(b"POST /size HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nhalf")
        answer = raw.recv(1000) + raw.recv(1000)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"error":"too-slow"' in answer


def test_the_log_is_json_lines_without_secrets(process: Process, client: httpx.Client) -> None:
    client.post("/size?token=s3cret", content=b"s3cret", headers={"authorization": "s3cret", "cookie": "s3cret"})
    client.get("/health")
    wanted = [line for line in map(json.loads, process.err) if line.get("path") == "/size" and line["status"] == 200]
    assert {"time", "level", "service", "event", "method", "path", "status", "duration_ms", "client"} == set(wanted[-1])
    assert (wanted[-1]["event"], wanted[-1]["method"], wanted[-1]["client"]) == ("request", "POST", "somebody")
    assert "s3cret" not in process.output()
    assert "client" not in next(line for line in map(json.loads, process.err) if line.get("path") == "/health")


def test_all_bodies_together_are_bounded() -> None:
    """Sixteen requests with a whole body wait inside; the next gets a 503, and is served when they have left."""
    app = service_app("test", max_body=1000, max_held=16_000)
    leave = asyncio.Event()

    @app.post("/wait")
    async def wait() -> str:
        await leave.wait()
        return "done"

    async def ask() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.post("/wait", content=bytes(1000))).status_code

    async def scenario() -> None:
        waiting = [asyncio.create_task(ask()) for _ in range(16)]
        await asyncio.sleep(0.2)
        assert await ask() == 503
        leave.set()
        assert await asyncio.gather(*waiting) == [200] * 16
        assert await ask() == 200

    asyncio.run(asyncio.wait_for(scenario(), 20))


class Asked:
    """One request to `BodyLimits` as ASGI sees it; `sent` is the answer, `read` how often its body was read."""

    def __init__(self, *chunks: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self._chunks, self.headers, self.read, self.sent = list(chunks), headers, 0, list[dict[str, Any]]()

    async def to(self, app: BodyLimits) -> int:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": list(self.headers)}
        await app(scope, self._receive, self._send)
        return int(self.sent[0]["status"]) if self.sent else 0

    async def _receive(self) -> dict[str, Any]:
        self.read += 1
        if not self._chunks:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._chunks.pop(0), "more_body": bool(self._chunks)}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


def limits(app: Any, admit: Admit) -> BodyLimits:
    return BodyLimits(app, "test", max_body=1000, max_held=10_000, receive_s=5, send_s=5, admit=admit)


async def answer(scope: Any, receive: Any, send: Any) -> None:
    assert not (await receive())["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_a_body_has_as_many_bytes_as_its_request_is_admitted_with() -> None:
    app = limits(answer, lambda scope: 10)
    assert asyncio.run(Asked(b"12345", b"67890").to(app)) == 200
    assert asyncio.run(Asked(b"12345", b"678901").to(app)) == 413  # in pieces, without a declared length
    declared = Asked(*[b"x"] * 5, headers=((b"content-length", b"11"),))
    assert asyncio.run(declared.to(app)) == 413


def test_more_is_never_admitted_than_the_service_allows() -> None:
    app = limits(answer, lambda scope: 1 << 30)
    assert asyncio.run(Asked(bytes(1000)).to(app)) == 200
    assert asyncio.run(Asked(bytes(1001)).to(app)) == 413


def test_a_request_that_is_not_admitted_never_reaches_the_application() -> None:
    def refuse(scope: object) -> int:
        raise Unauthenticated("unsigned", "no signature")

    async def unreachable(*_: object) -> None:
        raise AssertionError

    assert asyncio.run(Asked(b"body").to(limits(unreachable, refuse))) == 401


@pytest.mark.parametrize("end", ["answer", "failure", "disconnect", "too-large"])
def test_however_a_request_ends_its_body_is_no_longer_counted(end: str) -> None:
    async def fail(*_: object) -> None:
        raise ValueError

    bodies = {"disconnect": (), "too-large": (bytes(101),)}
    app = limits(fail if end == "failure" else answer, lambda scope: 100)

    async def scenario() -> list[int]:
        return [await Asked(*bodies.get(end, (bytes(100),))).to(app) for _ in range(200)]  # 10,000 bytes are held

    assert set(asyncio.run(scenario())) == {{"answer": 200, "failure": 500, "disconnect": 0, "too-large": 413}[end]}
