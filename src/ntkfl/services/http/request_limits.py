"""The one middleware of a service: bounds every request in size, time and number, and logs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ntkfl.errors import Refused
from ntkfl.services.http.refusals import error_response, refusal_response
from ntkfl.services.log import log
from ntkfl.services.metrics import METRICS

MAX_UNDER_WAY = 8  # requests of one client at once
_PIECE = 64 << 10  # of a long answer: what a slow reader has not taken waits as one object for all, not as a copy each
_AGAIN_S = 60.0  # between two lines of the log about one reason to refuse
_DRAIN = 32 << 20  # bytes of a refused body that are read and dropped, so that its sender gets to read the answer

_ORDINARY = ("not-ready", "unknown-batch")  # what the aggregator meets in every round
Admit = Callable[[Scope], tuple[str, int]]


class _Disconnected(Exception):
    """The client closed the connection before its request was complete."""


class _SlowReader(Exception):
    """The client does not read the answer."""


@dataclass
class _Body:
    """A request's body as it came; `size` remains when the application has taken the data."""

    data: bytearray = field(default_factory=bytearray)
    size: int = 0
    coming: bool = True
    taken: bool = False
    client: str = ""  # whose requests under way it counts among


class RequestLimits:
    """Around an application, which sees a request when its body is here whole.

    A body has at most `max_body` bytes (413) and arrives within `receive_s` seconds (408); all bodies together hold at
    most `max_held` bytes (503). Answers go out in pieces, each read within `send_s`. An unexpected error is a 500
    without details.

    `admit`, where given, looks at a request before its body is read: it returns the client that asks ("" for anybody)
    and how many bytes the body may have, or raises `Refused`. It must have checked the signature, since a client's
    requests under way are counted (429): nobody else must be able to make any in its name.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: str,
        max_body: int,
        max_held: int,
        receive_s: float,
        send_s: float,
        admit: Admit | None = None,
    ) -> None:
        self._app, self._service, self._admit = app, service, admit
        self._max_body, self._max_held = max_body, max_held
        self._receive_s, self._send_s = receive_s, send_s
        self._held = 0
        self._under_way: Counter[str] = Counter()
        self._refused: dict[str, tuple[float, int]] = {}  # by reason: when it was said last, and how often since

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
                    raise _SlowReader from None

        try:
            await self._receive(scope, receive, body)
            await self._app(scope, _replay(body, receive), answer)
        except Refused as error:  # by `_receive`: the application answers its own
            scope.setdefault("state", {})["refused"] = error.reason
            if body.coming:
                await _drain(receive)
            await refusal_response(error, {"connection": "close"})(scope, receive, answer)
        except _Disconnected:
            pass
        except _SlowReader:
            log("reader-too-slow", level=logging.WARNING, service=self._service)  # the server cuts the connection
        except Exception as error:
            log("internal-error", level=logging.ERROR, failed=error, service=self._service)
            if status:
                raise  # too late for an answer: the server cuts the connection
            await error_response(500, "internal", "the service failed; its log says where")(scope, receive, answer)
        finally:
            self._release(body)
            known = scope.get("state", {})
            client, seconds = known.get("client"), time.perf_counter() - begun
            METRICS.count("ntkfl_requests_total", service=self._service, status=status)
            METRICS.count("ntkfl_request_seconds_total", seconds, service=self._service)
            if "refused" in known:
                self._tell(known["refused"])
            log(
                "request",
                level=logging.DEBUG,
                service=self._service,
                method=scope["method"],
                path=scope["path"][:200],
                status=status or None,
                duration_ms=round(1e3 * seconds, 1),
                **({"client": client} if client else {}),
            )

    async def _receive(self, scope: Scope, receive: Receive, body: _Body) -> None:
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:
            body.coming = False  # where it ends is what nobody agrees on: not a byte of it is read
            raise Refused("two-lengths", "a body has a content-length or a transfer-encoding, not both")
        length = headers.get(b"content-length", b"0")  # the server has checked that it is a number
        declared = int(length) if len(length) < 19 else 1 << 63
        _check_size(declared, self._max_body)
        try:
            async with asyncio.timeout(self._receive_s):
                allowed = self._max_body
                if self._admit is not None:
                    client, admitted = await asyncio.to_thread(self._admit, scope)
                    self._count(client, body)
                    allowed = min(allowed, admitted)
                    _check_size(declared, allowed)
                while body.coming:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Disconnected
                    chunk, body.coming = message.get("body", b""), message.get("more_body", False)
                    body.data += chunk
                    body.size += len(chunk)
                    self._held += len(chunk)
                    _check_size(body.size, allowed)
                    if self._held > self._max_held:
                        raise Refused("busy", "too many bodies are on their way in; try again soon")
        except TimeoutError:
            body.coming = False
            raise Refused("too-slow", f"a body must arrive within {self._receive_s:g} seconds") from None

    def _tell(self, reason: str) -> None:
        """Count a refusal, and log the first of a reason and then one a minute: nobody can fill the disk with them."""
        METRICS.count("ntkfl_refusals_total", service=self._service, reason=reason)
        if reason in _ORDINARY:
            return
        said, times = self._refused.get(reason, (-_AGAIN_S, 0))
        now, times = time.monotonic(), times + 1
        if now >= said + _AGAIN_S:
            log(f"refused: {reason}", level=logging.WARNING, service=self._service, times=times)
            said, times = now, 0
        self._refused[reason] = said, times

    def _count(self, client: str, body: _Body) -> None:
        if not client:
            return
        if self._under_way[client] >= MAX_UNDER_WAY:
            raise Refused("too-many", f"a client may have {MAX_UNDER_WAY} requests under way, and this one has")
        self._under_way[client] += 1
        body.client = client

    def _release(self, body: _Body) -> None:
        self._held -= body.size
        if body.client:
            self._under_way[body.client] -= 1
            if not self._under_way[body.client]:
                del self._under_way[body.client]


def _check_size(size: int, allowed: int) -> None:
    if size > allowed:
        raise Refused("too-large", f"the body of such a request may have at most {allowed} bytes")


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
    """Read on for a moment: a connection closed on a client that is still sending takes the answer with it."""
    seen = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            while seen < _DRAIN:
                message = await receive()
                if not message.get("more_body", False):
                    return
                seen += len(message.get("body", b""))
