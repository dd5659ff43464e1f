"""Requests are bounded in size, time and number, and logged without secrets: over TLS, and as the middleware alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ntkfl.services.http.request_limits import Admit, RequestLimits
from tests.services.example_service import caller, connection, error, make, start
from tests.services.processes import Process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("limits"))


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[Process]:
    with start(folder) as process:
        yield process


@pytest.fixture
def client(process: Process, folder: Path) -> Iterator[httpx.Client]:
    with caller(process.urls["front"], folder) as client:
        yield client


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


def limits(app: Any, admit: Admit) -> RequestLimits:
    return RequestLimits(app, "test", max_body=1000, max_held=10_000, receive_s=5, send_s=5, admit=admit)


async def answer(scope: Any, receive: Any, send: Any) -> None:
    assert not (await receive())["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})
