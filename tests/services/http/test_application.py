"""The common base of the services, spoken to over TLS: errors, bounds and the log."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ntkfl.services.http.application import service_app
from ntkfl.version import __version__
from tests.services.example_service import caller, connection, make, start
from tests.services.processes import Process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("web"))


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[Process]:
    with start(folder) as process:
        yield process


@pytest.fixture
def client(process: Process, folder: Path) -> Iterator[httpx.Client]:
    with caller(process.urls["front"], folder) as client:
        yield client


def error(response: httpx.Response) -> tuple[int, str]:
    """The status and reason of an answer that must have the one shape of errors."""
    body = response.json()
    assert set(body) == {"error", "message"}
    assert body["message"]
    assert "\n" not in body["message"]
    return response.status_code, body["error"]


def test_health(client: httpx.Client) -> None:
    response = client.get("/health")
    assert response.json() == {"status": "ok", "service": "front", "version": __version__}
    assert response.headers["cache-control"] == "no-store"
    assert "server" not in response.headers


def test_errors_have_one_shape(client: httpx.Client) -> None:
    assert error(client.get("/refused")) == (409, "replayed")
    assert client.get("/refused").json()["message"] == "two lines"
    assert error(client.get("/nowhere")) == (404, "not-found")
    assert error(client.get("/size")) == (405, "method-not-allowed")
    assert error(client.get("/docs")) == (404, "not-found")
    assert error(client.get("/openapi.json")) == (404, "not-found")


def test_what_is_unexpected_tells_no_details(client: httpx.Client, process: Process) -> None:
    response = client.get("/broken")
    assert error(response) == (500, "internal")
    assert "hidden-detail" not in response.text
    assert "hidden-detail" not in process.output()
    record = next(line for line in map(json.loads, process.err) if line["event"] == "internal-error")
    assert (record["level"], record["error"], record["service"]) == ("error", "ValueError", "front")
    assert re.fullmatch(r"program.py:\d+", record["where"])


@pytest.mark.parametrize(
    "body",
    [
        b'{"token": "s3cret", "number": "s3cret"}',
        b'{"token": "s3cret", "number": 1, "s3cret": 2}',
        b'{"token": ["s3cret"], "number": 1}',
        b'{"number": "s3cret"}',
        b'{"token": "s3cret"',
        b'"s3cret"',
        b"",
    ],
)
def test_what_is_invalid_is_not_echoed(client: httpx.Client, body: bytes) -> None:
    response = client.post("/body", content=body, headers={"content-type": "application/json"})
    assert error(response) == (422, "invalid")
    assert "s3cret" not in response.text


@pytest.mark.parametrize("body", [b"\xff\xfe", b"[" * 50_000, b"1" * 5000])
def test_json_that_breaks_parsers_is_refused(client: httpx.Client, body: bytes) -> None:
    status, _ = error(client.post("/body", content=body, headers={"content-type": "application/json"}))
    assert status in (400, 422)


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


@pytest.mark.parametrize(
    "first", [b"content-length: 4\r\ntransfer-encoding: chunked", b"transfer-encoding: chunked\r\ncontent-length: 4"]
)
def test_a_body_with_two_lengths_is_refused_and_its_connection_closed(
    process: Process, folder: Path, first: bytes
) -> None:
    """Where such a body ends is for each reader to guess: what one takes for it, the next takes for another request."""
    smuggled = b"0\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    with connection(process.urls["front"], folder) as raw:
        raw.sendall(b"POST /size HTTP/1.1\r\nhost: x\r\n" + first + b"\r\n\r\n" + smuggled)
        answer = b""
        while piece := raw.recv(4096):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"error":"two-lengths"' in answer
    assert answer.count(b"HTTP/1.1") == 1


def test_nobody_is_sent_to_another_host(client: httpx.Client) -> None:
    for path in ("/size/", "/health/", "//health", "/body/?x=1"):
        response = client.post(path, headers={"host": "attacker.example"})
        assert error(response) == (404, "not-found"), path
        assert "location" not in response.headers
        assert "attacker.example" not in response.text


def test_who_sends_it_all_before_reading_still_reads_the_refusal(process: Process, folder: Path) -> None:
    for _ in range(10):
        with connection(process.urls["front"], folder) as raw:
            raw.sendall(b"POST /size HTTP/1.1\r\nhost: x\r\ncontent-length: 3000000\r\n\r\n" + bytes(3_000_000))
            assert raw.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_arrive_is_given_up(process: Process, folder: Path) -> None:
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
    """Sixteen requests with a whole body wait inside; the next is told to come back, and served when they left."""
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
