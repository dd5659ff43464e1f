"""A small service, run as a process with two listeners, to speak to over TLS."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import httpx

from ntkfl.atomic import write_private
from ntkfl.crypto.certificates import Authority
from tests.services.processes import Process

PROGRAM = """
import asyncio, sys
from pathlib import Path
from pydantic import BaseModel, ConfigDict
from ntkfl.services.http import server
from fastapi import Request
from ntkfl.services.http.application import service_app
from ntkfl.services.http.server import Listener, serve
from ntkfl.services.log import configure_logging
from ntkfl.errors import Refused

server.HEADERS_S = 1
server.STOP_S = 3
app = service_app("front", max_body=100_000, receive_s=1)

class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")
    token: str
    number: int

@app.post("/size")
async def size(request: Request) -> int:
    request.state.client = "somebody"
    return len(await request.body())

@app.post("/body")
def body(body: Body) -> str:
    return "fine"

@app.get("/refused")
def refused() -> None:
    raise Refused("replayed", "two\\nlines")

@app.get("/broken")
def broken() -> None:
    raise ValueError("hidden-detail")

@app.get("/slow")
async def slow(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"

configure_logging("test", level="debug")
folder = Path(sys.argv[1])
at = dict(host="127.0.0.1", port=0, cert=folder / "tls.pem", key=folder / "key.pem")
serve([Listener(app, **at), Listener(service_app("back", max_body=10), **at, client_ca=folder / "callers.pem")])
"""


def make(folder: Path) -> Path:
    """The program and the certificates of both sides, in `folder`."""
    services, callers, others = Authority("services"), Authority("callers"), Authority("others")
    cert, key = services.server("test", "127.0.0.1")
    files = {"tls.pem": cert, "key.pem": key, "ca.pem": services.pem, "callers.pem": callers.pem}
    files["caller.pem"] = b"".join(callers.client("caller"))
    files["other.pem"] = b"".join(others.client("caller"))
    files["server.pem"] = b"".join(callers.server("caller", "127.0.0.1"))  # the right authority, the wrong purpose
    for name, data in files.items():
        write_private(folder / name, data)
    (folder / "program.py").write_text(PROGRAM)
    return folder


def start(folder: Path) -> Process:
    return Process(folder / "program.py", folder, listeners=2)


def caller(url: str, folder: Path, certificate: str | None = None) -> httpx.Client:
    """Trusts the test's authority alone."""
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    if certificate:
        context.load_cert_chain(folder / certificate)
    return httpx.Client(base_url=url, verify=context, trust_env=False, timeout=20)


def connection(url: str, folder: Path) -> ssl.SSLSocket:
    """For what a well-behaved client cannot send."""
    parts = httpx.URL(url)
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    return context.wrap_socket(socket.create_connection((parts.host, parts.port), 10), server_hostname=parts.host)


def error(response: httpx.Response) -> tuple[int, str]:
    """The status and reason of an answer that must have the one shape of errors."""
    body = response.json()
    assert set(body) == {"error", "message"}
    assert body["message"]
    assert "\n" not in body["message"]
    return response.status_code, body["error"]
