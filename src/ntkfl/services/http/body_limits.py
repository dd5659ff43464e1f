"""The one middleware of a service: an application sees a request when its body is here whole, and within its bounds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ntkfl.errors import Refused
from ntkfl.services.http.refusals import error_response, refusal_response
from ntkfl.services.log import log

_PIECE = 64 << 10  # of a long answer: what a slow reader has not taken waits as one object for all, not as a copy each
_DRAIN = 32 << 20  # bytes of a refused body that are read and dropped, so that its sender gets to read the answer
Admit = Callable[[Scope], int]


class BodyLimits:
    """A body has at most `max_body` bytes (413) and arrives within `receive_s` seconds (408); all bodies together hold
    at most `max_held` bytes (503). Answers go out in pieces, each read within `send_s`. An unexpected error is a 500
    without details.

    `admit`, where given, looks at a request before its body is read: it returns how many bytes the body may have, or
    raises `Refused`.
    """

    def __init__(
        self, app: ASGIApp, service: str, max_body: int, max_held: int, receive_s: float, send_s: float,
        admit: Admit | None = None,
    ) -> None:  # fmt: skip
        self._app, self._service, self._admit = app, service, admit
        self._max_body, self._max_held = max_body, max_held
        self._receive_s, self._send_s = receive_s, send_s
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begun, status, body, taken = time.perf_counter(), 0, bytearray(), -1
        known = scope.setdefault("state", {})

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"cache-control", b"no-store")]
            rest = memoryview(message.get("body", b""))
            async with asyncio.timeout(self._send_s) as patience:  # of a piece: the whole takes as long as it takes
                while len(rest) > _PIECE:
                    await send({"type": message["type"], "body": bytes(rest[:_PIECE]), "more_body": True})
                    rest = rest[_PIECE:]
                    patience.reschedule(asyncio.get_running_loop().time() + self._send_s)
                await send({**message, "body": bytes(rest)} if "body" in message else message)

        async def whole() -> Message:
            nonlocal taken
            if taken >= 0:
                return await receive()
            taken, data = len(body), bytes(body)
            body.clear()  # one copy is enough
            return {"type": "http.request", "body": data, "more_body": False}

        try:
            if await self._read(scope, receive, body):
                await self._app(scope, whole, answer)
        except Refused as error:  # by `_read`: the application answers its own
            known["refused"] = error.reason
            if error.reason not in ("two-lengths", "too-slow"):
                await _drain(receive)
            await refusal_response(error, {"connection": "close"})(scope, receive, answer)
        except Exception as error:
            if status and isinstance(error, TimeoutError):
                return log("reader-too-slow", level=logging.WARNING, service=self._service)  # the server cuts it off
            log("internal-error", level=logging.ERROR, failed=error, service=self._service)
            if status:
                raise  # too late for an answer: the server cuts the connection
            await error_response(500, "internal", "the service failed; its log says where")(scope, receive, answer)
        finally:
            self._held -= len(body) + max(0, taken)
            asked = {"method": scope["method"], "path": scope["path"][:200], "status": status or None}
            asked |= {name: known[name] for name in ("client", "refused") if known.get(name)}
            took = round(1e3 * (time.perf_counter() - begun), 1)
            log("request", level=logging.DEBUG, service=self._service, **asked, duration_ms=took)

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> bool:
        """The whole body into `body`; False where the client hangs up before."""
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:  # where it ends is what nobody agrees on
            raise Refused("two-lengths", "a body has a content-length or a transfer-encoding, not both")
        length = headers.get(b"content-length", b"0")  # the server has checked that it is a number
        declared, allowed = int(length) if len(length) < 19 else 1 << 63, self._max_body
        _check_size(declared, allowed)
        try:
            async with asyncio.timeout(self._receive_s):
                if self._admit is not None:
                    allowed = min(allowed, await asyncio.to_thread(self._admit, scope))
                    _check_size(declared, allowed)
                coming = True
                while coming:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    chunk, coming = message.get("body", b""), message.get("more_body", False)
                    body += chunk
                    self._held += len(chunk)
                    _check_size(len(body), allowed)
                    if self._held > self._max_held:
                        raise Refused("busy", "too many bodies are on their way in; try again soon")
        except TimeoutError:
            raise Refused("too-slow", f"a body must arrive within {self._receive_s:g} seconds") from None
        return True


def _check_size(size: int, allowed: int) -> None:
    if size > allowed:
        raise Refused("too-large", f"the body of such a request may have at most {allowed} bytes")


async def _drain(receive: Receive) -> None:
    """Read on for a moment: a connection closed on a client that is still sending takes the answer with it."""
    seen = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            while seen < _DRAIN and (message := await receive()).get("more_body", False):
                seen += len(message.get("body", b""))
