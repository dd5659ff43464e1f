"""Floods: too many connections, readers that do not read, requests that nobody signed."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from tests.deployment.federation import PREFIX, Deployment

from ntkfl.crypto.hpke import SigningKey
from ntkfl.services.http import client as asking
from ntkfl.services.http.client import HttpClient, retry_after
from ntkfl.services.http.signing import sign_request
from tests.services.example_service import caller, connection, make
from tests.services.processes import Process

CONNECTIONS = 8
PROGRAM = """
import asyncio, sys
from pathlib import Path
from ntkfl.services.http import server
from ntkfl.services.http.application import service_app
from ntkfl.services.http.server import Listener, serve
from ntkfl.services.log import configure_logging
from ntkfl.errors import Refused
from starlette.responses import Response

folder = Path(sys.argv[1])
server.HEADERS_S = 30
app = service_app("front", max_body=1000, send_s=2)
asked = 0
BIG = bytes(8 << 20)

@app.get("/slow")
async def slow(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"

@app.get("/big")
async def big() -> Response:
    return Response(BIG, media_type="application/octet-stream")

@app.get("/third-time")
def third_time() -> int:
    global asked
    asked += 1
    if asked < 3:
        raise Refused("busy", "later")
    return asked

configure_logging("test", level="debug")
tls = dict(cert=folder / "tls.pem", key=folder / "key.pem")
serve([Listener(app, "127.0.0.1", 0, **tls, connections=int(sys.argv[2]))])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make(tmp_path_factory.mktemp("flood"))
    (made / "flood.py").write_text(PROGRAM)
    return made


def start(folder: Path, connections: int = CONNECTIONS) -> Process:
    return Process(folder / "flood.py", folder, str(connections))


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[Process]:
    with start(folder) as process:
        yield process


def test_at_the_limit_of_connections_requests_get_a_503_and_later_ones_are_served(
    process: Process, folder: Path
) -> None:
    url = process.urls["front"]
    with caller(url, folder) as late:
        with ExitStack() as stack:
            for _ in range(CONNECTIONS):
                stack.enter_context(connection(url, folder))
            time.sleep(0.5)
            assert late.get("/health").status_code == 503
        time.sleep(0.5)
        assert late.get("/health").status_code == 200


def test_a_slow_reader_is_cut_and_costs_no_memory(folder: Path) -> None:
    """Thirty ask for 8 MiB each and take none of it: 240 MiB, if each waited in memory."""
    with start(folder, connections=100) as process, ExitStack() as stack:
        before = resident(process.pid)
        slow = [stack.enter_context(connection(process.urls["front"], folder)) for _ in range(30)]
        for raw in slow:
            raw.sendall(b"GET /big HTTP/1.1\r\nhost: x\r\n\r\n")
        most = before
        until = time.monotonic() + 30
        while sum("reader-too-slow" in line for line in process.err) < 30:
            most = max(most, resident(process.pid))
            assert time.monotonic() < until
            time.sleep(0.1)
        assert most - before < 60
        with caller(process.urls["front"], folder) as client:
            assert len(client.get("/big").content) == 8 << 20  # a client that reads gets all of it
        assert "Traceback" not in process.output()


def resident(pid: int) -> float:
    """MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def test_a_client_obeys_retry_after(process: Process, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(asking.time, "sleep", pauses.append)
    assert HttpClient(process.urls["front"], folder / "ca.pem").ask("GET", "/third-time").json() == 3
    assert len(pauses) == 2
    assert all(1 <= pause <= 1.5 for pause in pauses)  # the first own pause would be a tenth of that


@pytest.mark.parametrize(("said", "seconds"), [("7", 7), ("", 0), ("soon", 0), ("-1", 0), ("9999999", 60), ("²", 0)])
def test_retry_after_is_obeyed_within_bounds(said: str, seconds: float) -> None:
    assert retry_after(httpx.Response(503, headers={"retry-after": said.encode()})) == seconds


def test_requests_with_a_stolen_credential_are_refused_before_their_bodies(tmp_path: Path) -> None:
    """The credential is no secret: the key server and the shuffler see it. Requests that carry it without a signature
    of its owner's are refused before their bodies, which never come.
    """
    deployment = Deployment(tmp_path)
    with deployment.start() as process, ExitStack() as stack:
        victim, thief = deployment.client("victim"), SigningKey.generate()
        stolen = sign_request(victim.credential, thief, "POST", f"{PREFIX}/rows", b"x" * 100)
        stolen |= {"host": "x", "content-length": "100"}
        lines = [f"POST {PREFIX}/rows HTTP/1.1", *(f"{name}: {value}" for name, value in stolen.items()), "", ""]
        at = httpx.URL(process.urls["shuffler"])
        for _ in range(16):
            raw = socket.create_connection((at.host, at.port), 10)
            held = stack.enter_context(deployment.tls().wrap_socket(raw, server_hostname=at.host))
            held.sendall("\r\n".join(lines).encode())
            assert held.recv(100).startswith(b"HTTP/1.1 401")
        assert victim.ask("POST", "/hello").status_code == 200
        deployment.hang_up()
