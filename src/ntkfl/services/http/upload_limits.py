"""The shuffler's door: what of a client's request is let in before its body is read."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ntkfl.errors import Refused

UNDER_WAY = 8  # requests of one client at once


class UploadLimits:
    """Nothing of a stranger's, no more than an open batch allows, and few requests of one client at once, so that
    nobody's crowd out the others'. `limit` says who asks ("" for anybody) and how many bytes the body may have, or
    refuses. It must have checked the signature: a client's requests are counted against it, so others must not be able
    to make any in its name.
    """

    def __init__(self, app: ASGIApp, limit: Callable[[Scope], tuple[str, int]]) -> None:
        self._app, self._limit = app, limit
        self._under_way: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        asking: list[str] = []
        try:
            await self._app(scope, self._bounded(scope, receive, asking), send)
        finally:
            for client in asking:
                self._under_way[client] -= 1
                if not self._under_way[client]:
                    del self._under_way[client]

    def _bounded(self, scope: Scope, receive: Receive, asking: list[str]) -> Receive:
        """`receive` with these bounds; who turns out to ask is put into `asking`."""
        left: int | None = None
        refused = False  # once: what is read after that is thrown away

        async def bounded() -> Message:
            nonlocal left, refused
            if refused:
                return await receive()
            try:
                if left is None:
                    client, allowed = await asyncio.to_thread(self._limit, scope)
                    if client:
                        self._admit(client)
                        asking.append(client)
                    declared = dict(scope["headers"]).get(b"content-length", b"0")
                    _check_size(int(declared[:18]), allowed)
                    left = allowed
                message = await receive()
                left = _check_size(len(message.get("body", b"")), left)
            except Refused:
                refused = True
                raise
            return message

        return bounded

    def _admit(self, client: str) -> None:
        if self._under_way[client] >= UNDER_WAY:
            raise Refused(429, "too-many", f"a client may have {UNDER_WAY} requests under way, and this one has")
        self._under_way[client] += 1


def _check_size(size: int, left: int) -> int:
    if size > left:
        raise Refused(413, "too-large", "the body is larger than what this asks for can be")
    return left - size
