"""What every service stands on: one shape of errors, bounded requests, and a log line a request."""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ntkfl.crypto.credentials import Credential, check_request
from ntkfl.errors import ConfigError, Refused
from ntkfl.services.http.openapi import Health, refusals
from ntkfl.services.http.server import RETRY_AFTER_S, Listener, serve
from ntkfl.services.log import configure_logging, log
from ntkfl.version import __version__

try:
    from fastapi import FastAPI, Request
    from fastapi.concurrency import run_in_threadpool
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException
    from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send
except ImportError as error:  # the core works without; this room does not
    raise ConfigError("services need the extra 'services': pip install 'ntkfl[services]'") from error

__all__ = [
    "FastAPI",
    "Listener",
    "Request",
    "configure_logging",
    "log",
    "run_in_threadpool",
    "serve",
    "service_app",
    "target",
    "who_asks",
]

RECEIVE_S = 60.0  # for one body to arrive
SEND_S = 60.0  # for a reader to take one piece of an answer
_PIECE = 64 << 10  # of a long answer: what a slow reader has not taken waits as one object for all, not as a copy each
_DRAIN = 32 << 20  # bytes of a refused body that are read and thrown away, so that its sender gets to read the answer


def service_app(
    title: str,
    *,
    max_body: int,
    receive_s: float = RECEIVE_S,
    send_s: float = SEND_S,
    max_held: int | None = None,
    lifespan: Lifespan[FastAPI] | None = None,
) -> FastAPI:
    """An application with `GET /health`, errors as `{"error": reason, "message": line}`, and bounded requests.

    A handler raises `Refused`; bodies above `max_body` bytes (413) or slower than `receive_s` seconds (408) never reach
    it. All bodies together hold at most `max_held` bytes (16 bodies, or 64 MiB if that is more): beyond that, 503. Who
    gets a 429 or 503 is told when to ask again. Answers go out in pieces, each within `send_s`, as they are read.
    Where a handler knows who asks it says so with `request.state.client = name`, for the log.
    """
    held = max(16 * max_body, 64 << 20) if max_held is None else max_held
    app = FastAPI(
        title=title,
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # a redirect would go wherever the request's Host header says
        lifespan=lifespan,
    )
    app.add_middleware(_Guard, service=title, max_body=max_body, max_held=held, receive_s=receive_s, send_s=send_s)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return _error(error.status, error.reason, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return _error(422, "invalid", _what_is_invalid(error))

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> JSONResponse:
        reason = re.sub("[^a-z]+", "-", http.HTTPStatus(error.status_code).phrase.lower())
        return _error(error.status_code, reason, str(error.detail), error.headers)

    @app.get("/health", response_model=Health, responses=refusals())
    async def health() -> dict[str, str]:
        return {"status": "ok", "service": title, "version": __version__}

    return app


def target(scope: Scope) -> str:
    """The path and query as they were asked for, which is what is signed."""
    path, query = str(scope["raw_path"], "latin-1"), str(scope["query_string"], "latin-1")
    return f"{path}?{query}" if query else path


async def who_asks(request: Request, key_server: bytes, federation: str, *, ended_too: bool = False) -> Credential:
    """Who signed this request, with a credential of the federation's key server; `Refused` with 401 if nobody did, or
    the credential has ended (and that matters).
    """
    body = await request.body()
    asked = request.method, target(request.scope), body
    credential = check_request(request.headers, key_server, federation, *asked, ended_too=ended_too)
    request.state.client = credential.client
    return credential


def _error(status: int, reason: str, message: str, headers: Any = None) -> JSONResponse:
    if status in (429, 503):
        headers = {"retry-after": str(RETRY_AFTER_S), **(headers or {})}
    return JSONResponse({"error": reason, "message": " ".join(message.split())}, status, headers)


def _what_is_invalid(error: RequestValidationError) -> str:
    """Where and why, without a word of the input, which may hold secrets."""
    first = error.errors()[0]
    place = first["loc"][:-1] if first["type"] == "extra_forbidden" else first["loc"]  # a stranger's name is input too
    return f"{'.'.join(map(str, place)) or 'request'}: {first['type'].replace('_', ' ')}"


class _Gone(Exception):
    """The one who asked has left."""


class _Stuck(Exception):
    """The one who asked does not read the answer."""


@dataclass
class _Body:
    """A request's body as it came; `size` remains when the application has taken the data."""

    data: bytearray = field(default_factory=bytearray)
    size: int = 0
    coming: bool = True
    taken: bool = False


class _Guard:
    """Around an application: bounds each request, logs it, and turns what nobody expected into a 500 without details.

    A body is received whole before the application sees the request.
    """

    def __init__(
        self, app: ASGIApp, service: str, max_body: int, max_held: int, receive_s: float, send_s: float
    ) -> None:
        self._app, self._service = app, service
        self._max_body, self._max_held = max_body, max_held
        self._receive_s, self._send_s = receive_s, send_s
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begun, status, body = time.perf_counter(), 0, _Body()

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"cache-control", b"no-store")]
            for piece in _pieces(message):
                try:
                    async with asyncio.timeout(self._send_s):  # of a piece: the whole takes as long as it takes
                        await send(piece)
                except TimeoutError:
                    raise _Stuck from None

        try:
            await self._receive(scope, receive, body)
            await self._app(scope, _replay(body, receive), answer)
        except Refused as error:  # by `_receive`: the application answers its own
            if body.coming:
                await _drain(receive)
            await _error(error.status, error.reason, str(error), {"connection": "close"})(scope, receive, answer)
        except _Gone:
            pass
        except _Stuck:
            log("reader-too-slow", level=logging.WARNING, service=self._service)  # the server cuts the connection
        except Exception as error:
            log("internal-error", level=logging.ERROR, failed=error, service=self._service)
            if status:
                raise  # too late for an answer: the server cuts the connection
            await _error(500, "internal", "the service failed; its log says where")(scope, receive, answer)
        finally:
            self._held -= body.size
            client = scope.get("state", {}).get("client")
            log(
                "request",
                service=self._service,
                method=scope["method"],
                path=scope["path"][:200],
                status=status or None,
                duration_ms=round(1e3 * (time.perf_counter() - begun), 1),
                **({"client": client} if client else {}),
            )

    async def _receive(self, scope: Scope, receive: Receive, body: _Body) -> None:
        too_large = Refused(413, "too-large", f"a body may have at most {self._max_body} bytes")
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:
            body.coming = False  # where it ends is what nobody agrees on: not a byte of it is read
            raise Refused(400, "two-lengths", "a body has a content-length or a transfer-encoding, not both")
        declared = headers.get(b"content-length", b"0")
        if len(declared) > 18 or int(declared) > self._max_body:  # the server has checked that it is a number
            raise too_large
        try:
            async with asyncio.timeout(self._receive_s):
                while body.coming:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    chunk, body.coming = message.get("body", b""), message.get("more_body", False)
                    body.data += chunk
                    body.size += len(chunk)
                    self._held += len(chunk)
                    if body.size > self._max_body:
                        raise too_large
                    if self._held > self._max_held:
                        raise Refused(503, "busy", "too many bodies are on their way in; try again soon")
        except TimeoutError:
            body.coming = False
            raise Refused(408, "too-slow", f"a body must arrive within {self._receive_s:g} seconds") from None


def _pieces(message: Message) -> Iterator[Message]:
    """A part of an answer in parts that are not too long: the server waits between two until its buffer has room."""
    body = memoryview(message.get("body", b""))
    while len(body) > _PIECE:
        yield {"type": message["type"], "body": bytes(body[:_PIECE]), "more_body": True}
        body = body[_PIECE:]
    yield {**message, "body": bytes(body)} if "body" in message else message


def _replay(body: _Body, receive: Receive) -> Receive:
    """`receive` as the application sees it: the body that is here already, then whatever comes."""

    async def replayed() -> Message:
        if body.taken:
            return await receive()
        data, body.data, body.taken = bytes(body.data), bytearray(), True
        return {"type": "http.request", "body": data, "more_body": False}

    return replayed


async def _drain(receive: Receive) -> None:
    """Read on for a moment: a connection closed on somebody who is still sending takes the answer with it."""
    seen = 0
    with contextlib.suppress(TimeoutError, Refused):  # refused once more, where a stricter bound is asked too
        async with asyncio.timeout(5):
            while seen < _DRAIN:
                message = await receive()
                if not message.get("more_body", False):
                    return
                seen += len(message.get("body", b""))
