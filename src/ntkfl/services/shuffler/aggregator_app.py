"""What the shuffler offers the aggregator over HTTP, on a listener of its own."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from starlette.responses import StreamingResponse

from ntkfl.crypto.credentials import ROLES
from ntkfl.crypto.row_frames import FRAME_BYTES, BatchKey, frame_rows, pack_rows
from ntkfl.errors import MessageError, Refused, TrustError
from ntkfl.services.announcement import Head
from ntkfl.services.http.application import BINARY, service_app
from ntkfl.services.log import log
from ntkfl.services.shuffler.batch import Status
from ntkfl.services.shuffler.long_poll import LongPollEvent
from ntkfl.services.shuffler.schemas import BESIDE_ROWS, MAX_BODY, RUN, Clients, check_run
from ntkfl.services.shuffler.store import Shuffler
from ntkfl.services.trusted_peers import TrustedPeers

BATCH = f"{RUN}/batches/{{round}}/{{exchange}}"
PIECE = 1 << 20  # bytes of a released batch that are read at once


def aggregator_app(
    shuffler: Shuffler,
    peers: TrustedPeers,
    long_poll: LongPollEvent,
    refresh: Callable[[], Awaitable[None]],
    most: int = MAX_BODY,
) -> FastAPI:
    """Under `/v1/runs/{run}`: clients, announcements, batches and reports. Its listener admits the aggregator alone.

    `most`: bytes of a submission; no batch is opened that asks a client for more.
    """
    signer = bytes.fromhex(peers.aggregator.signing_key)

    def known(run: str) -> None:
        check_run(run, peers)

    def batch_key(round: int, exchange: int) -> BatchKey:
        try:
            return BatchKey(round, exchange).check()
        except MessageError as error:
            raise Refused("malformed", str(error)) from None

    keyed, checked = Depends(batch_key), [Depends(known)]
    binary: dict[str, Any] = {"dependencies": checked, "response_class": Response}
    app = service_app("shuffler-aggregator", max_body=MAX_BODY, ready=shuffler.check)

    @app.get(f"{RUN}/clients", dependencies=checked)
    def clients(role: str = "client") -> Clients:
        if role not in ROLES:
            raise Refused("invalid", f"a role is one of {', '.join(ROLES)}")
        present = shuffler.clients(role)
        named = role == "evaluator" or shuffler.presence.may_be_named(len(present))
        return Clients(clients=present, lapsed=shuffler.lapsed(role) if named else [])

    @app.get(f"{RUN}/latest", dependencies=checked)
    def latest() -> dict[str, int | BatchKey | None]:
        sequence, key = shuffler.latest()
        return {"sequence": sequence, "key": key}

    @app.post(f"{RUN}/announcements", dependencies=checked)
    async def announcements(request: Request) -> dict[str, int]:
        signed = await request.body()
        try:  # the batch that is opened is the one that clients will see
            head, _ = Head.check(signed, signer, peers.federation, peers.run)
        except TrustError as error:
            raise Refused("unsigned", f"not the aggregator's announcement: {error}") from None
        except MessageError as error:
            raise Refused("malformed", str(error)) from None
        asked = head.batch
        if asked is not None:
            if BESIDE_ROWS + asked.max_rows * asked.row_bytes > most:
                raise Refused("terms", f"a client's rows may have at most {most} bytes in all")
            await refresh()
        sequence = await asyncio.to_thread(shuffler.publish, signed, head.key, asked)
        long_poll.notify()
        log("published", level=logging.DEBUG, sequence=sequence, round=head.key.round, exchange=head.key.exchange)
        return {"sequence": sequence}

    @app.get(BATCH, dependencies=checked)
    def status(key: BatchKey = keyed) -> Status:
        return shuffler.status(key)

    @app.post(f"{BATCH}/release", **binary)
    def release(key: BatchKey = keyed) -> Response:
        again = shuffler.status(key).state == "released"  # the aggregator did not get all of it
        announced, (count, size) = shuffler.announced(key), shuffler.permute(key)
        if not again:
            level = logging.INFO if key.exchange == 0 else logging.DEBUG
            log(f"round {key.round}: released the rows of {shuffler.status(key).clients} clients", level=level)
        some = max(1, PIECE // size)  # rows that are in memory at once, however many there are
        pieces = (b"".join(shuffler.released(key, first, some)) for first in range(0, count, some))
        length = {"content-length": str(FRAME_BYTES + count * size)}
        return StreamingResponse(frame_rows(announced, count, size, pieces), media_type=BINARY, headers=length)

    @app.get(f"{BATCH}/masks", **binary)
    def masks(key: BatchKey = keyed) -> Response:
        return Response(pack_rows(shuffler.announced(key), [shuffler.masks(key)]), media_type=BINARY)

    @app.post(f"{BATCH}/cancel", dependencies=checked)
    def cancel(key: BatchKey = keyed) -> dict[str, str]:
        answered = shuffler.status(key).clients
        shuffler.cancel(key)
        log(f"round {key.round}: cancelled, {answered} clients had answered", level=logging.WARNING)
        return {"status": "cancelled"}

    @app.delete(BATCH, dependencies=checked)
    def forget(key: BatchKey = keyed) -> dict[str, str]:
        shuffler.forget(key)
        return {"status": "forgotten"}

    @app.get(f"{BATCH}/reports", dependencies=checked)
    def reports(key: BatchKey = keyed) -> dict[str, list[str]]:
        return {"reports": [base64.b64encode(sealed).decode() for sealed in shuffler.reports(key)]}

    return app
