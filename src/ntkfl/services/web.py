"""What both services share: an application that looks at headers first and bounds bodies, and a server over TLS.

Limits on addresses and rates are a proxy's: put one in front of a service that the internet can reach.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ntkfl.atomic import check_private
from ntkfl.crypto.certificates import TLS_CERT, TLS_KEY
from ntkfl.crypto.credentials import Credential
from ntkfl.errors import ConfigError, Refused
from ntkfl.extras import missing
from ntkfl.services.peers import Peers
from ntkfl.services.signing import check_headers
from ntkfl.version import __version__

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:  # the core works without; this room does not
    raise missing("a service", "services") from error

logger = logging.getLogger("ntkfl.services")
CONNECTIONS = 4096  # at once; while there are as many, requests get a 503
RECEIVE_S = 60.0  # for one body to arrive
RETRY_AFTER_S = 1  # until a caller that gets a 503 may ask again
_STATUS = {  # of a refusal; 409 of all others, as what was asked for does not fit what is there
    **dict.fromkeys(("unauthenticated", "unsigned"), 401),
    **dict.fromkeys(("not-aggregator", "not-client", "revoked"), 403),
    **dict.fromkeys(("unknown-batch", "unknown-run"), 404),
    "too-slow": 408,
    "no-length": 411,
    "too-large": 413,
    **dict.fromkeys(("busy", "storage"), 503),
}


def service_app(name: str, routes: Sequence[Route], ready: Callable[[], None]) -> Starlette:
    """An application with `GET /health` (the process answers) and `GET /ready` (its state can be written: `ready`
    returns, or raises `Refused`). Errors are `{"error": reason, "message": line}`; a handler raises `Refused`.
    """
    healthy = True

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "service": name, "version": __version__})

    async def is_ready(_: Request) -> Response:
        nonlocal healthy
        try:
            await run_in_threadpool(ready)
        except Refused as error:
            if healthy:  # said once, however often it is asked
                logger.error("not ready: %s", error)
            healthy = False
            raise
        healthy = True
        return JSONResponse({"status": "ok", "service": name, "version": __version__})

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return _answer(_STATUS.get(error.reason, 409), error.reason, str(error))

    async def other(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _answer(error.status_code, "no-such-request", str(error.detail))

    async def failed(_: Request, error: Exception) -> Response:
        trace = error.__traceback__
        while trace and trace.tb_next:
            trace = trace.tb_next
        where = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else "?"
        logger.error("internal error: %s at %s", type(error).__name__, where)  # its message may quote a secret
        return _answer(500, "internal", "the service failed; its log says where")

    return Starlette(
        routes=[Route("/health", health), Route("/ready", is_ready), *routes],
        exception_handlers={Refused: refused, HTTPException: other, Exception: failed},
    )


def _answer(status: int, reason: str, message: str) -> Response:
    """A refusal as it travels; with 503, when to retry. Where a body was not read, the connection ends."""
    headers = {"connection": "close"} | ({"retry-after": str(RETRY_AFTER_S)} if status == 503 else {})
    return JSONResponse({"error": reason, "message": " ".join(message.split())}, status, headers)


def target(request: Request) -> str:
    """The path and query as they were asked for, which is what is signed."""
    path, query = str(request.scope["raw_path"], "latin-1"), str(request.scope["query_string"], "latin-1")
    return f"{path}?{query}" if query else path


class SignedRequest:
    """A request whose headers prove who asks: `credential` is the caller's, None the aggregator's."""

    def __init__(self, request: Request, peers: Peers) -> None:
        """`Refused` before a byte of the body is read."""
        self._request = request
        self.credential: Credential | None
        self.credential, self._digest = check_headers(request.headers, peers, request.method, target(request))

    @property
    def client(self) -> Credential:
        if self.credential is None:
            raise Refused("not-client", "only clients ask for this")
        return self.credential

    async def body(self, most: int = 0) -> bytes:
        """The body, if it is the one that was signed and has at most `most` bytes."""
        body = await read_body(self._request, most)
        if (await run_in_threadpool(hashlib.sha256, body)).digest() != self._digest:
            raise Refused("unauthenticated", "the request cannot be believed: its body is not the one that was signed")
        return body


async def read_body(request: Request, most: int, seconds: float = RECEIVE_S) -> bytes:
    """The whole body. `Refused` where it declares no length, or more than `most` bytes, or is not here in time."""
    declared = request.headers.get("content-length", "0")
    if "transfer-encoding" in request.headers or not (
        declared.isascii() and declared.isdecimal() and len(declared) < 19
    ):
        raise Refused("no-length", "a request declares the length of its body")
    if int(declared) > most:
        raise Refused("too-large", f"the body of such a request may have at most {most} bytes")
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():  # the server checks that no more comes than was declared
                body += piece
    except (TimeoutError, ClientDisconnect):
        raise Refused("too-slow", f"a body must arrive within {seconds:g} seconds") from None
    return bytes(body)


def serve(name: str, app: Starlette, folder: Path, url: str, host: str | None, port: int | None) -> None:
    """Serve over TLS until SIGTERM or SIGINT, and let requests under way end. `host` and `port` (0: any that is free)
    are where to listen; those of `url` if not given. Says `listening https://HOST:PORT service=NAME`.
    """
    parts = urlsplit(url)
    at = host or parts.hostname or "", (parts.port or 443) if port is None else port
    cert, key = folder / TLS_CERT, folder / TLS_KEY
    if not (cert.is_file() and key.is_file()):
        raise ConfigError(f"no certificate and key to serve with in {cert} and {key}")
    check_private(key)
    config = uvicorn.Config(
        app,
        ssl_certfile=cert,
        ssl_keyfile=key,
        http="h11",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=3,  # also for connections that nobody uses
    )
    family = socket.AF_INET6 if ":" in at[0] else socket.AF_INET
    try:
        config.load()
        with socket.create_server(at, family=family, backlog=config.backlog) as listening:
            bound = listening.getsockname()
            print(
                f"listening https://{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]} service={name}",
                flush=True,
            )
            uvicorn.Server(config).run(sockets=[listening])
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot serve on {at[0]}:{at[1]}: {getattr(error, 'strerror', None) or error}") from None


def configure_logging() -> None:
    """A line per round and per problem on standard error, with numbers and never a secret; of libraries, warnings."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logger.setLevel(logging.INFO)
