"""What the shuffler offers clients over HTTP: they sign their requests.

Requests are logged without a name or an address: the times at which a client polls, greets and sends would together say
as much as its name beside its rows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, FastAPI, Query, Request, Response
from starlette.datastructures import Headers
from starlette.types import Scope

from ntkfl.crypto.credentials import Credential
from ntkfl.crypto.hpke import SigningKey
from ntkfl.crypto.mask_format import SEED_BYTES
from ntkfl.crypto.receipt import issue_receipt
from ntkfl.crypto.row_frames import Announced, unpack_rows
from ntkfl.errors import MessageError, Refused
from ntkfl.services.http.application import BINARY, service_app, target
from ntkfl.services.http.signing import check_headers, check_request
from ntkfl.services.shuffler.announcement_store import REPORT_BYTES
from ntkfl.services.shuffler.long_poll import LongPollEvent
from ntkfl.services.shuffler.schemas import BESIDE_ROWS, MAX_BODY, RUN, check_run
from ntkfl.services.shuffler.store import Shuffler
from ntkfl.services.trusted_peers import TrustedPeers

MAX_HELD = 512 << 20  # bytes of all submissions under way, unless the shuffler's operator says otherwise
WAIT_S = 20.0  # that a request waits for an announcement
SEQUENCE_HEADER = "ntkfl-sequence"
Framed = tuple[Announced, list[memoryview]]  # rows are views of the body they came in
After = Annotated[int, Query(ge=0, lt=1 << 63)]


def client_app(
    shuffler: Shuffler,
    peers: TrustedPeers,
    long_poll: LongPollEvent,
    signer: SigningKey,
    *,
    max_held: int = MAX_HELD,
    wait_s: float = WAIT_S,
    lifespan: Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """Under `/v1/runs/{run}`: `POST /hello`, `GET /announcement?after=`, `POST /rows`, `POST /sums`, `POST /reports`,
    all signed.
    """
    key_server = bytes.fromhex(peers.key_server.signing_key)

    def admit(scope: Scope) -> int:
        """How many bytes the body may have. `Refused`, before a byte of it is read, where no client of this federation
        signed the request, or a revoked one.
        """
        if scope["path"] in ("/health", "/ready"):
            return 0
        asked = Headers(scope=scope), key_server, peers.federation, scope["method"], target(scope)
        client = check_headers(*asked)[0].client
        shuffler.refuse_revoked(client)
        rows = shuffler.submission_limit() if scope["path"].endswith(("/rows", "/sums")) else 0
        return BESIDE_ROWS + max(rows, REPORT_BYTES)

    async def signed_by(request: Request, run: str) -> Credential:
        body = await request.body()
        check = (request.headers, key_server, peers.federation, request.method, target(request.scope), body)
        credential = await asyncio.to_thread(check_request, *check)
        check_run(run, peers)
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

    def receipt(announced: Announced) -> dict[str, str]:
        issued = issue_receipt(signer, peers.federation, peers.run, announced)
        return {"status": "received", "receipt": issued.hex()}

    client, rows_of, masked_of = Depends(signed_by), Depends(frame), Depends(masked_frame)
    most = min(MAX_BODY, max_held)
    app = service_app(
        "shuffler", max_body=most, max_held=max_held, admit=admit, lifespan=lifespan, ready=shuffler.check
    )

    @app.post(f"{RUN}/hello")
    def hello(credential: Credential = client) -> dict[str, str]:
        shuffler.present(credential.client, credential.role)
        return {"status": "present"}

    @app.get(f"{RUN}/announcement", response_class=Response)
    async def announcement(after: After = 0, credential: Credential = client) -> Response:
        await asyncio.to_thread(shuffler.refuse_revoked, credential.client)
        found = shuffler.announcement(after)
        if found is None and await long_poll.wait(wait_s):
            found = shuffler.announcement(after)
        if found is None:
            return Response(status_code=204, headers={"connection": "close"} if long_poll.closed else None)
        return Response(found[1], media_type=BINARY, headers={SEQUENCE_HEADER: str(found[0])})

    @app.post(f"{RUN}/rows")
    def rows(credential: Credential = client, framed: Framed = rows_of) -> dict[str, str]:
        shuffler.submit(credential.client, *framed)
        return receipt(framed[0])

    @app.post(f"{RUN}/sums")
    def sums(credential: Credential = client, masked: tuple[bytes, Framed] = masked_of) -> dict[str, str]:
        seed, (announced, rows) = masked
        shuffler.submit(credential.client, announced, rows, seed)
        return receipt(announced)

    @app.post(f"{RUN}/reports")
    def reports(credential: Credential = client, framed: Framed = rows_of) -> dict[str, str]:
        if credential.role != "evaluator":
            raise Refused("not-evaluator", "only evaluators report")
        announced, sealed = framed
        if len(sealed) != 1:
            raise Refused("malformed", f"a report is one row, got {len(sealed)}")
        shuffler.present(credential.client, credential.role)
        shuffler.report(credential.client, announced, sealed[0])
        return receipt(announced)

    return app
