"""What both services share: an application that looks at headers first and bounds bodies, and a server over TLS.

Limits on addresses and rates are a proxy's: put one in front of a service that the internet can reach.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ntkfl.atomic import check_private
from ntkfl.crypto.signed import Credential, check_request
from ntkfl.errors import ConfigError, Refused
from ntkfl.extras import missing
from ntkfl.services.peers import TLS_CERT, TLS_KEY, Peers
from ntkfl.version import __version__

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:  # the core works without; this room does not
    raise missing("a service", "services") from error

logger = logging.getLogger("ntkfl.services")
CONNECTIONS = 4096  # at once; while there are as many, requests get a 503
RECEIVE_S = 60.0  # for one body to arrive
_STATUS = {  # of a refusal; 409 of all others, as what was asked for does not fit what is there
    "unauthenticated": 401,
    **dict.fromkeys(("not-aggregator", "not-client", "revoked"), 403),
    **dict.fromkeys(("unknown-batch", "unknown-run"), 404),
    "too-large": 413,
    **dict.fromkeys(("busy", "storage"), 503),
}


def service_app(name: str, routes: Sequence[Route]) -> Starlette:
    """An application with `GET /health`, which says that the process answers. Where a handler raises `Refused`, the
    answer is `{"error": reason, "message": line}` with the status of that reason.
    """

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "service": name, "version": __version__})

    async def refused(_: Request, error: Exception) -> Response:
        """As a body may not have been read, the connection ends."""
        assert isinstance(error, Refused)
        answer = {"error": error.reason, "message": " ".join(str(error).split())}
        return JSONResponse(answer, _STATUS.get(error.reason, 409), {"connection": "close"})

    return Starlette(routes=[Route("/health", health), *routes], exception_handlers={Refused: refused})


class SignedRequest:
    """A request whose headers prove who asks: `credential` is the caller's, None the aggregator's."""

    def __init__(self, request: Request, peers: Peers) -> None:
        """`Refused` before a byte of the body is read."""
        scope = request.scope  # the path and query as they were asked for: those are what is signed
        path = b"?".join(filter(None, (scope["raw_path"], scope["query_string"]))).decode("latin-1")
        self._request, header = request, request.headers.get("authorization", "")
        trusted = peers.key_of("key_server"), peers.key_of("aggregator"), peers.federation
        self.credential: Credential | None
        self.credential, self._digest = check_request(header, *trusted, request.method, path)

    async def body(self, most: int = 0) -> bytes:
        """The whole body, if it is the one that was signed, has at most `most` bytes, and is here in time."""
        body = bytearray()
        try:
            async with asyncio.timeout(RECEIVE_S):
                async for piece in self._request.stream():
                    body += piece
                    if len(body) > most:
                        raise Refused("too-large", f"the body of such a request may have at most {most} bytes")
        except (TimeoutError, ClientDisconnect):
            raise Refused("too-slow", f"a body must arrive within {RECEIVE_S:g} seconds") from None
        if (await run_in_threadpool(hashlib.sha256, body)).digest() != self._digest:
            raise Refused("unauthenticated", "the body is not the one that was signed")
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
    try:
        config.load()
        with socket.create_server(at, backlog=config.backlog) as listening:
            address, bound = listening.getsockname()
            print(f"listening https://{address}:{bound} service={name}", flush=True)
            uvicorn.Server(config).run(sockets=[listening])
    except (OSError, OverflowError) as error:
        raise Refused("busy", f"cannot serve on {at[0]}:{at[1]}: {error}") from None


def configure_logging() -> None:
    """A line per round and per problem on standard error, with numbers and never a secret; of libraries, warnings."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logger.setLevel(logging.INFO)
