"""The shuffler as a service: one listener for clients, who sign what they ask, and one for the aggregator alone.

It keeps no log of who sent what when: requests of clients are logged without a name or an address, since the times at
which one polls, greets and sends would together say as much as its name beside its rows.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from fastapi import Depends, FastAPI, Query, Request, Response
from starlette.datastructures import Headers
from starlette.responses import StreamingResponse
from starlette.types import Scope

from ntkfl.crypto.credentials import ROLES, Credential, check_headers, check_request
from ntkfl.crypto.hpke import SigningKey
from ntkfl.crypto.receipt import issue_receipt
from ntkfl.crypto.row_frames import FRAME_BYTES, Announced, BatchKey, frame_rows, unpack_rows
from ntkfl.errors import MessageError, Refused, TrustError
from ntkfl.services.announcement import Head
from ntkfl.services.heap import give_back
from ntkfl.services.http.application import Listener, log, serve, service_app, target
from ntkfl.services.http.long_poll import LongPollEvent
from ntkfl.services.http.openapi import AGGREGATOR, BINARY, SHUFFLER
from ntkfl.services.http.upload_limits import UploadLimits
from ntkfl.services.shuffler.announcement_store import REPORT_BYTES
from ntkfl.services.shuffler.revocations import Revocations
from ntkfl.services.shuffler.store import Shuffler
from ntkfl.services.trusted_peers import TrustedPeers

STATE, SIGNING_KEY = "state.sqlite", "signing-key.pem"
MAX_BODY = 256 << 20  # of a submission or an announcement
MAX_HELD = 512 << 20  # of all submissions under way, unless its operator says otherwise
PIECE = 1 << 20  # bytes of a released batch that are read at once
WAIT_S = 20.0  # a client is kept waiting for an announcement
CONNECTIONS = 4096  # of clients, most of which wait
SEQUENCE_HEADER, NEWEST_HEADER = "ntkfl-sequence", "ntkfl-newest"
Framed = tuple[Announced, list[memoryview]]  # rows are views of the body they came in
After = Annotated[int, Query(ge=0, lt=1 << 63)]


def serve_shuffler(folder: Path, at: tuple[str, int], aggregator_at: tuple[str, int], max_held: int = MAX_HELD) -> None:
    """Serve both listeners on the state in `folder` until told to stop. At most `max_held` bytes of bodies wait."""
    pins = TrustedPeers.read(folder)
    run = f"{pins.federation}/{pins.run}"
    shuffler = Shuffler(folder / STATE, floor=pins.shuffler.min_clients, run=run)
    bell, stop = LongPollEvent(), threading.Event()
    signer = SigningKey.load(folder / SIGNING_KEY)
    if signer.public.hex() != pins.shuffler.signing_key:
        raise TrustError(f"the key in {folder} is not the one that others have pinned")
    revocations = Revocations(shuffler, pins, folder / "ca.pem")

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(revocations.keep_refreshing()), asyncio.create_task(bell.close_after(stop))]
        yield
        for task in tasks:
            task.cancel()

    tls = folder / "tls.pem", folder / "tls-key.pem"
    clients = client_app(shuffler, pins, bell, signer, max_held=max_held, lifespan=lifespan)
    aggregator = aggregator_app(shuffler, pins, bell, revocations.refresh, most=min(MAX_BODY, max_held))
    try:
        serve(
            [
                Listener(clients, *at, *tls, connections=CONNECTIONS),
                Listener(aggregator, *aggregator_at, *tls, client_ca=folder / "aggregator-ca.pem"),
            ],
            stop,
        )
    finally:
        shuffler.close()


# -- For clients ------------------------------------------------------------------------------------------------------


def client_app(
    shuffler: Shuffler,
    pins: TrustedPeers,
    bell: LongPollEvent,
    signer: SigningKey,
    *,
    max_held: int = MAX_HELD,
    wait_s: float = WAIT_S,
    lifespan: Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """Under `/v1/runs/{run}`: `POST /hello`, `GET /announcement?after=`, `POST /rows`, `POST /reports`, all signed."""
    app = service_app("shuffler", max_body=min(MAX_BODY, max_held), max_held=max_held, lifespan=lifespan)
    key_server = bytes.fromhex(pins.key_server.signing_key)

    def limit(scope: Scope) -> tuple[str, int]:
        """Who asks, and how many bytes the body may have; refused before a byte of it is read if a stranger asks."""
        if scope["path"] == "/health":
            return "", 0
        asked = Headers(scope=scope), key_server, pins.federation, scope["method"], target(scope)
        client = check_headers(*asked)[0].client
        shuffler.refuse_revoked(client)
        rows = shuffler.submission_limit() if scope["path"].endswith("/rows") else 0
        return client, FRAME_BYTES + max(rows, REPORT_BYTES)

    app.add_middleware(UploadLimits, limit=limit)

    async def who(request: Request, run: str) -> Credential:
        body = await request.body()
        check = (request.headers, key_server, pins.federation, request.method, target(request.scope), body)
        credential = await asyncio.to_thread(check_request, *check)
        _check_run(run, pins)
        return credential

    async def frame(request: Request) -> Framed:
        try:
            return await asyncio.to_thread(unpack_rows, memoryview(await request.body()))
        except MessageError as error:
            raise Refused(422, "malformed", str(error)) from None

    def receipt(announced: Announced) -> dict[str, str]:
        return {"status": "received", "receipt": issue_receipt(signer, pins.federation, pins.run, announced).hex()}

    signed_by, rows_of = Depends(who), Depends(frame)

    @app.post("/v1/runs/{run}/hello", **SHUFFLER["hello"])
    def hello(credential: Credential = signed_by) -> dict[str, str]:
        shuffler.present(credential.client, credential.role)
        return {"status": "present"}

    @app.get("/v1/runs/{run}/announcement", **SHUFFLER["announcement"])
    async def announcement(after: After = 0, credential: Credential = signed_by) -> Response:
        await asyncio.to_thread(shuffler.refuse_revoked, credential.client)
        found = shuffler.announcement(after)
        if found is None and await bell.wait(wait_s):
            found = shuffler.announcement(after)
        if found is None:
            return Response(status_code=204, headers={"connection": "close"} if bell.closed else None)
        headers = {SEQUENCE_HEADER: str(found[0]), NEWEST_HEADER: str(shuffler.newest)}
        return Response(found[1], media_type=BINARY, headers=headers)

    @app.post("/v1/runs/{run}/rows", **SHUFFLER["rows"])
    def rows(credential: Credential = signed_by, framed: Framed = rows_of) -> dict[str, str]:
        shuffler.submit(credential.client, *framed)
        return receipt(framed[0])

    @app.post("/v1/runs/{run}/reports", **SHUFFLER["reports"])
    def reports(credential: Credential = signed_by, framed: Framed = rows_of) -> dict[str, str]:
        if credential.role != "evaluator":
            raise Refused(403, "not-evaluator", "only evaluators report")
        announced, sealed = framed
        if len(sealed) != 1:
            raise Refused(422, "malformed", f"a report is one row, got {len(sealed)}")
        shuffler.present(credential.client, credential.role)
        shuffler.report(credential.client, announced, sealed[0])
        return receipt(announced)

    return app


# -- For the aggregator -----------------------------------------------------------------------------------------------


def aggregator_app(
    shuffler: Shuffler,
    pins: TrustedPeers,
    bell: LongPollEvent,
    refresh: Callable[[], Awaitable[None]],
    most: int = MAX_BODY,
) -> FastAPI:
    """Under `/v1/runs/{run}`: clients, announcements, batches and reports. Its listener admits the aggregator alone.

    `most`: bytes of a submission; no batch is opened that asks a client for more.
    """
    app = service_app("shuffler-aggregator", max_body=MAX_BODY)
    signer = bytes.fromhex(pins.aggregator.signing_key)

    def known(run: str) -> None:
        _check_run(run, pins)

    def batch_key(round: int, exchange: int) -> BatchKey:
        try:
            return BatchKey(round, exchange).check()
        except MessageError as error:
            raise Refused(422, "malformed", str(error)) from None

    keyed, checked = Depends(batch_key), [Depends(known)]
    run, batch = "/v1/runs/{run}", "/v1/runs/{run}/batches/{round}/{exchange}"

    @app.get(f"{run}/clients", dependencies=checked, **AGGREGATOR["clients"])
    def clients(role: str = "client") -> dict[str, list[str]]:
        if role not in ROLES:
            raise Refused(422, "invalid", f"a role is one of {', '.join(ROLES)}")
        return {"clients": shuffler.clients(role)}

    @app.get(f"{run}/latest", dependencies=checked, **AGGREGATOR["latest"])
    def latest() -> dict[str, object]:
        sequence, key = shuffler.latest()
        return {"sequence": sequence, "key": key}

    @app.post(f"{run}/announcements", dependencies=checked, **AGGREGATOR["announcements"])
    async def announcements(request: Request) -> dict[str, int]:
        signed = await request.body()
        try:  # what clients will see is what is opened here: nobody is asked behind their backs
            head, _ = Head.check(signed, signer, pins.federation, pins.run)
        except TrustError as error:
            raise Refused(403, "unsigned", f"not the aggregator's announcement: {error}") from None
        except MessageError as error:
            raise Refused(422, "malformed", str(error)) from None
        asked = head.batch
        if asked is not None:
            if FRAME_BYTES + asked.max_rows * asked.row_bytes > most:
                raise Refused(422, "terms", f"a client's rows may have at most {most} bytes in all")
            await refresh()
        sequence = await asyncio.to_thread(shuffler.publish, signed, head.key, asked)
        bell.ring()
        log("published", sequence=sequence, batch=head.key)
        return {"sequence": sequence}

    @app.get(batch, dependencies=checked, **AGGREGATOR["status"])
    def status(key: BatchKey = keyed) -> dict[str, object]:
        return asdict(shuffler.status(key))

    @app.post(f"{batch}/release", dependencies=checked, **AGGREGATOR["release"])
    def release(key: BatchKey = keyed) -> Response:
        announced, (count, size) = shuffler.announced(key), shuffler.permute(key)
        some = max(1, PIECE // size)  # rows that are in memory at once, however many there are
        pieces = (b"".join(shuffler.released(key, first, some)) for first in range(0, count, some))
        length = {"content-length": str(FRAME_BYTES + count * size)}
        return StreamingResponse(frame_rows(announced, count, size, pieces), media_type=BINARY, headers=length)

    @app.post(f"{batch}/cancel", dependencies=checked, **AGGREGATOR["cancel"])
    def cancel(key: BatchKey = keyed) -> dict[str, str]:
        shuffler.cancel(key)
        return {"status": "cancelled"}

    @app.delete(batch, dependencies=checked, **AGGREGATOR["forget"])
    def forget(key: BatchKey = keyed) -> dict[str, str]:
        shuffler.forget(key)
        give_back()  # what its rows took
        return {"status": "forgotten"}

    @app.get(f"{batch}/reports", dependencies=checked, **AGGREGATOR["batch_reports"])
    def reports(key: BatchKey = keyed) -> dict[str, list[str]]:
        return {"reports": [base64.b64encode(sealed).decode() for sealed in shuffler.reports(key)]}

    return app


def _check_run(run: str, pins: TrustedPeers) -> None:
    if run != pins.run:
        raise Refused(404, "unknown-run", "this shuffler serves another run")
