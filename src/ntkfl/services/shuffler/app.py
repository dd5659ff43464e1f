"""The shuffler over HTTP: one listener for clients, which sign their requests, and one for the aggregator alone.

Requests of clients are logged without a name or an address: the times at which a client polls, greets and sends would
together say as much as its name beside its rows.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request, Response
from starlette.datastructures import Headers
from starlette.responses import StreamingResponse
from starlette.types import Scope

from ntkfl.crypto.credentials import ROLES, Credential
from ntkfl.crypto.hpke import SigningKey
from ntkfl.crypto.mask_format import SEED_BYTES, SIGNED_TICKET_BYTES
from ntkfl.crypto.mask_tickets import check_ticket, pack_released, split_submission
from ntkfl.crypto.receipt import issue_receipt
from ntkfl.crypto.row_frames import FRAME_BYTES, Announced, BatchKey, frame_rows, pack_rows, unpack_rows
from ntkfl.errors import MessageError, Refused, TrustError
from ntkfl.services.announcement import Head
from ntkfl.services.heap import trim_heap
from ntkfl.services.http.application import BINARY, SIGNED, binary_answer, binary_body, service_app, target
from ntkfl.services.http.long_poll import LongPollEvent
from ntkfl.services.http.refusals import refusals
from ntkfl.services.http.server import Listener, serve
from ntkfl.services.http.signing import check_headers, check_request
from ntkfl.services.log import log
from ntkfl.services.shuffler.announcement_store import REPORT_BYTES
from ntkfl.services.shuffler.presence import AFTER, Presence
from ntkfl.services.shuffler.revocations import Revocations
from ntkfl.services.shuffler.schemas import BatchStatus, Clients, Done, Latest, Receipt, Reports, Sequence
from ntkfl.services.shuffler.store import Shuffler
from ntkfl.services.shuffler.watch import ShufflerWatch
from ntkfl.services.status import STOPPED, StatusFile
from ntkfl.services.trusted_peers import TrustedPeers, agreed_cohort

STATE, SIGNING_KEY = "state.sqlite", "signing-key.pem"
MAX_BODY = 256 << 20  # of a submission or an announcement
MAX_HELD = 512 << 20  # of all submissions under way, unless its operator says otherwise
PIECE = 1 << 20  # bytes of a released batch that are read at once
WAIT_S = 20.0  # that a request waits for an announcement
CONNECTIONS = 4096  # of clients, most of which wait
RUN, BATCH = "/v1/runs/{run}", "/v1/runs/{run}/batches/{round}/{exchange}"
SEQUENCE_HEADER, NEWEST_HEADER = "ntkfl-sequence", "ntkfl-newest"
Framed = tuple[Announced, list[memoryview]]  # rows are views of the body they came in
After = Annotated[int, Query(ge=0, lt=1 << 63)]

# What FastAPI cannot see of bodies that are not JSON, for the OpenAPI documents.
_ROWS = binary_body("rows in their frame, each sealed to the aggregator")
_MASKED = binary_body("the seed of a mask, and behind it a frame of one row: a masked vector, sealed to the aggregator")
_TICKETED = binary_body("the same, with the key server's ticket for a second seed, and its signature, in between")
_REPORT = binary_body("one row in its frame, sealed to the aggregator")
_SIGNED_ANNOUNCEMENT = binary_body("an announcement that the aggregator signed")
_NUMBER = {"required": True, "schema": {"type": "integer", "minimum": 1}}
_ANNOUNCEMENT: dict[int | str, dict[str, Any]] = {
    200: binary_answer(
        "what the aggregator announced and signed", headers={SEQUENCE_HEADER: _NUMBER, NEWEST_HEADER: _NUMBER}
    ),
    204: {"description": "nothing newer yet; ask again"},
}
_MASKS: dict[int | str, dict[str, Any]] = {200: binary_answer("the sum of the released clients' masks, in a frame")}
_TICKETS: dict[int | str, dict[str, Any]] = {200: binary_answer("tickets of the released clients, signed")}
_RELEASED: dict[int | str, dict[str, Any]] = {200: binary_answer("the batch's rows, permuted, in their frame")}


def serve_shuffler(
    folder: Path,
    at: tuple[str, int],
    aggregator_at: tuple[str, int],
    max_held: int = MAX_HELD,
    lapse_after: int = AFTER,
) -> None:
    """Serve both listeners on the state in `folder` until told to stop. At most `max_held` bytes of bodies wait; for
    `lapse_after` see `Presence`.
    """
    peers = TrustedPeers.read(folder)
    run = f"{peers.federation}/{peers.run}"
    presence = Presence(lapse_after, agreed_cohort(folder))
    shuffler = Shuffler(folder / STATE, floor=peers.shuffler.min_clients, run=run, presence=presence)
    long_poll, stop = LongPollEvent(), threading.Event()
    signer = SigningKey.load(folder / SIGNING_KEY)
    if signer.public.hex() != peers.shuffler.signing_key:
        raise TrustError(f"the key in {folder} is not the one that federation.toml names")
    revocations = Revocations(shuffler, peers, folder / "ca.pem")
    status = StatusFile(folder, "shuffler", run=run)
    watch = ShufflerWatch(shuffler, status)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(revocations.keep_refreshing()),
            asyncio.create_task(long_poll.close_after(stop)),
            asyncio.create_task(watch.keep_looking()),
        ]
        yield
        for task in tasks:
            task.cancel()

    tls = folder / "tls.pem", folder / "tls-key.pem"
    clients = client_app(shuffler, peers, long_poll, signer, max_held=max_held, lifespan=lifespan, watch=watch)
    most = min(MAX_BODY, max_held)
    aggregator = aggregator_app(shuffler, peers, long_poll, revocations.refresh, signer, most=most, watch=watch)
    listeners = [
        Listener(clients, *at, *tls, connections=CONNECTIONS),
        Listener(aggregator, *aggregator_at, *tls, client_ca=folder / "aggregator-ca.pem"),
    ]
    try:
        with status.noting_problems():
            by = serve(listeners, stop)
    finally:
        shuffler.close()
    status.close(STOPPED, by)


# -- For clients ------------------------------------------------------------------------------------------------------


def client_app(
    shuffler: Shuffler,
    peers: TrustedPeers,
    long_poll: LongPollEvent,
    signer: SigningKey,
    *,
    max_held: int = MAX_HELD,
    wait_s: float = WAIT_S,
    lifespan: Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]] | None = None,
    watch: ShufflerWatch | None = None,
) -> FastAPI:
    """Under `/v1/runs/{run}`: `POST /hello`, `GET /announcement?after=`, `POST /rows`, `POST /sums`, `POST /reports`,
    all signed.
    """
    key_server = bytes.fromhex(peers.key_server.signing_key)

    def admit(scope: Scope) -> tuple[str, int]:
        """The client that signed the request, and how many bytes the body may have. `Refused`, before a byte of it is
        read, where no client of this federation did, or a revoked one.
        """
        if scope["path"] in ("/health", "/ready"):
            return "", 0
        asked = Headers(scope=scope), key_server, peers.federation, scope["method"], target(scope)
        client = check_headers(*asked)[0].client
        shuffler.refuse_revoked(client)
        rows = shuffler.submission_limit() if scope["path"].endswith(("/rows", "/sums")) else 0
        return client, SEED_BYTES + SIGNED_TICKET_BYTES + FRAME_BYTES + max(rows, REPORT_BYTES)

    async def signed_by(request: Request, run: str) -> Credential:
        body = await request.body()
        check = (request.headers, key_server, peers.federation, request.method, target(request.scope), body)
        credential = await asyncio.to_thread(check_request, *check)
        _check_run(run, peers)
        shuffler.presence.called(credential.client)
        return credential

    async def unpacked(body: memoryview) -> Framed:
        try:
            return await asyncio.to_thread(unpack_rows, body)
        except MessageError as error:
            raise Refused("malformed", str(error)) from None

    async def frame(request: Request) -> Framed:
        return await unpacked(memoryview(await request.body()))

    async def masked_frame(request: Request) -> tuple[bytes, Framed]:
        """The seed of a mask, and the frame behind it."""
        body = memoryview(await request.body())
        return bytes(body[:SEED_BYTES]), await unpacked(body[SEED_BYTES:])

    async def ticketed_frame(request: Request) -> tuple[bytes, bytes, Framed]:
        """The seed of a mask, the key server's signed ticket for another, and the frame behind them."""
        seed, signed, framed = split_submission(memoryview(await request.body()), SEED_BYTES)
        return seed, signed, await unpacked(framed)

    def receipt(announced: Announced) -> Receipt:
        return Receipt(receipt=issue_receipt(signer, peers.federation, peers.run, announced).hex())

    client, rows_of = Depends(signed_by), Depends(frame)
    masked_of, ticketed_of = Depends(masked_frame), Depends(ticketed_frame)
    signed, common = [SIGNED], refusals(401, 403, 404, 429)
    ready = (watch or ShufflerWatch(shuffler)).ready
    most = min(MAX_BODY, max_held)
    app = service_app("shuffler", max_body=most, max_held=max_held, admit=admit, lifespan=lifespan, ready=ready)

    @app.post(f"{RUN}/hello", dependencies=signed, responses=common)
    def hello(credential: Credential = client) -> Done:
        shuffler.present(credential.client, credential.role)
        return Done(status="present")

    @app.get(f"{RUN}/announcement", dependencies=signed, response_class=Response, responses=common | _ANNOUNCEMENT)
    async def announcement(after: After = 0, credential: Credential = client) -> Response:
        await asyncio.to_thread(shuffler.refuse_revoked, credential.client)
        found = shuffler.announcement(after)
        if found is None and await long_poll.wait(wait_s):
            found = shuffler.announcement(after)
        if found is None:
            return Response(status_code=204, headers={"connection": "close"} if long_poll.closed else None)
        headers = {SEQUENCE_HEADER: str(found[0]), NEWEST_HEADER: str(shuffler.newest)}
        return Response(found[1], media_type=BINARY, headers=headers)

    @app.post(f"{RUN}/rows", dependencies=signed, responses=common | refusals(409, 410), openapi_extra=_ROWS)
    def rows(credential: Credential = client, framed: Framed = rows_of) -> Receipt:
        shuffler.submit(credential.client, *framed)
        return receipt(framed[0])

    @app.post(f"{RUN}/sums", dependencies=signed, responses=common | refusals(409, 410), openapi_extra=_MASKED)
    def sums(credential: Credential = client, masked: tuple[bytes, Framed] = masked_of) -> Receipt:
        seed, (announced, rows) = masked
        shuffler.submit(credential.client, announced, rows, seed)
        return receipt(announced)

    @app.post(
        f"{RUN}/ticketed/sums", dependencies=signed, responses=common | refusals(409, 410), openapi_extra=_TICKETED
    )
    def ticketed(credential: Credential = client, masked: tuple[bytes, bytes, Framed] = ticketed_of) -> Receipt:
        seed, given, (announced, rows) = masked
        try:
            ticket = check_ticket(given, key_server, peers.federation, peers.run, credential.client, announced)
        except TrustError:
            raise Refused("unsigned", "no ticket of the key server's for this client and announcement") from None
        shuffler.submit(credential.client, announced, rows, seed, ticket)
        return receipt(announced)

    @app.post(f"{RUN}/reports", dependencies=signed, responses=common | refusals(409), openapi_extra=_REPORT)
    def reports(credential: Credential = client, framed: Framed = rows_of) -> Receipt:
        if credential.role != "evaluator":
            raise Refused("not-evaluator", "only evaluators report")
        announced, sealed = framed
        if len(sealed) != 1:
            raise Refused("malformed", f"a report is one row, got {len(sealed)}")
        shuffler.present(credential.client, credential.role)
        shuffler.report(credential.client, announced, sealed[0])
        return receipt(announced)

    return app


# -- For the aggregator -----------------------------------------------------------------------------------------------


def aggregator_app(
    shuffler: Shuffler,
    peers: TrustedPeers,
    long_poll: LongPollEvent,
    refresh: Callable[[], Awaitable[None]],
    own: SigningKey,
    most: int = MAX_BODY,
    watch: ShufflerWatch | None = None,
) -> FastAPI:
    """Under `/v1/runs/{run}`: clients, announcements, batches and reports. Its listener admits the aggregator alone.

    `own` signs what the second holder of masks is told. `most`: bytes of a submission; no batch is opened that asks a
    client for more.
    """
    signer = bytes.fromhex(peers.aggregator.signing_key)

    def known(run: str) -> None:
        _check_run(run, peers)

    def batch_key(round: int, exchange: int) -> BatchKey:
        try:
            return BatchKey(round, exchange).check()
        except MessageError as error:
            raise Refused("malformed", str(error)) from None

    keyed, checked, common = Depends(batch_key), [Depends(known)], refusals(404)
    watch = watch or ShufflerWatch(shuffler)
    app = service_app("shuffler-aggregator", max_body=MAX_BODY, ready=watch.ready)

    @app.get(f"{RUN}/clients", dependencies=checked, responses=common)
    def clients(role: str = "client") -> Clients:
        if role not in ROLES:
            raise Refused("invalid", f"a role is one of {', '.join(ROLES)}")
        present, lapsed = shuffler.clients(role), shuffler.lapsed(role)
        named = role == "client" and shuffler.presence.may_be_named(len(present))
        return Clients(clients=present, away=len(lapsed), lapsed=lapsed if named else [])

    @app.get(f"{RUN}/latest", dependencies=checked, responses=common)
    def latest() -> Latest:
        sequence, key = shuffler.latest()
        return Latest(sequence=sequence, key=None if key is None else list(key))

    @app.post(
        f"{RUN}/announcements",
        dependencies=checked,
        responses=common | refusals(403, 409),
        openapi_extra=_SIGNED_ANNOUNCEMENT,
    )
    async def announcements(request: Request) -> Sequence:
        signed = await request.body()
        try:  # the batch that is opened is the one that clients will see
            head, _ = Head.check(signed, signer, peers.federation, peers.run)
        except TrustError as error:
            raise Refused("unsigned", f"not the aggregator's announcement: {error}") from None
        except MessageError as error:
            raise Refused("malformed", str(error)) from None
        asked = head.batch
        if asked is not None:
            if SEED_BYTES + SIGNED_TICKET_BYTES + FRAME_BYTES + asked.max_rows * asked.row_bytes > most:
                raise Refused("terms", f"a client's rows may have at most {most} bytes in all")
            await refresh()
        sequence = await asyncio.to_thread(shuffler.publish, signed, head.key, asked)
        if asked is not None:
            watch.opened(asked)
        long_poll.notify()
        log("published", level=logging.DEBUG, sequence=sequence, round=head.key.round, exchange=head.key.exchange)
        return Sequence(sequence=sequence)

    @app.get(BATCH, dependencies=checked, responses=common)
    def status(key: BatchKey = keyed) -> BatchStatus:
        return BatchStatus.model_validate(asdict(shuffler.status(key)))

    @app.post(
        f"{BATCH}/release",
        dependencies=checked,
        response_class=Response,
        responses=common | refusals(410, 425) | _RELEASED,
    )
    def release(key: BatchKey = keyed) -> Response:
        announced, (count, size) = shuffler.announced(key), shuffler.permute(key)
        watch.released(key)
        some = max(1, PIECE // size)  # rows that are in memory at once, however many there are
        pieces = (b"".join(shuffler.released(key, first, some)) for first in range(0, count, some))
        length = {"content-length": str(FRAME_BYTES + count * size)}
        return StreamingResponse(frame_rows(announced, count, size, pieces), media_type=BINARY, headers=length)

    @app.get(
        f"{BATCH}/masks",
        dependencies=checked,
        response_class=Response,
        responses=common | refusals(409, 410, 425) | _MASKS,
    )
    def masks(key: BatchKey = keyed) -> Response:
        return Response(pack_rows(shuffler.announced(key), [shuffler.masks(key)]), media_type=BINARY)

    @app.get(
        f"{BATCH}/tickets",
        dependencies=checked,
        response_class=Response,
        responses=common | refusals(409, 410, 425) | _TICKETS,
    )
    def tickets(key: BatchKey = keyed) -> Response:
        signed = pack_released(own, peers.federation, peers.run, shuffler.released_set(key))
        return Response(signed, media_type=BINARY)

    @app.post(f"{BATCH}/cancel", dependencies=checked, responses=common)
    def cancel(key: BatchKey = keyed) -> Done:
        answered = shuffler.status(key).clients
        shuffler.cancel(key)
        watch.cancelled(key, answered)
        return Done(status="cancelled")

    @app.delete(BATCH, dependencies=checked, responses=common | refusals(425))
    def forget(key: BatchKey = keyed) -> Done:
        shuffler.forget(key)
        trim_heap()  # its rows were large
        return Done(status="forgotten")

    @app.get(f"{BATCH}/reports", dependencies=checked, responses=common)
    def reports(key: BatchKey = keyed) -> Reports:
        return Reports(reports=[base64.b64encode(sealed).decode() for sealed in shuffler.reports(key)])

    return app


def _check_run(run: str, peers: TrustedPeers) -> None:
    if run != peers.run:
        raise Refused("unknown-run", "this shuffler serves another run")
