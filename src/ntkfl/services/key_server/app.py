"""The key server over HTTP: enrols clients, and gives each of them the secret ρ of a training run, sealed to it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Scope

from ntkfl.crypto.credentials import NAME_PATTERN
from ntkfl.crypto.mask_format import SEED_BYTES
from ntkfl.crypto.row_frames import unpack_rows
from ntkfl.errors import MessageError, Refused
from ntkfl.services.http.application import BINARY, SIGNED, authenticate, binary_answer, binary_body, service_app
from ntkfl.services.http.refusals import refusals
from ntkfl.services.http.schemas import Answer
from ntkfl.services.key_server.store import KeyServer
from ntkfl.services.log import log
from ntkfl.services.metrics import METRICS
from ntkfl.services.trusted_peers import HEX_KEY

MAX_BODY, MAX_RELEASED = 16 << 10, 256 << 10  # of a request; of a released set, which has 160 kB of 10,000 clients
_SEED = binary_body("the seed of a second mask, in a frame of one row")
_RELEASED = binary_body("the set that the shuffler released and signed")
_MASKS: dict[int | str, dict[str, Any]] = {200: binary_answer("the sum of that set's second masks")}


class Enrolment(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    token: str = Field(min_length=1, max_length=200)
    client: str = Field(pattern=NAME_PATTERN)
    sealing_key: str = Field(pattern=HEX_KEY)
    signing_key: str = Field(pattern=HEX_KEY)
    proof: str = Field(pattern="^[0-9a-f]{128}$")


class Issued(Answer):
    credential: str = Field(description="base64 of a signature and what it signs")


class SealedSecret(Answer):
    """The run's ρ, sealed to the client that asked."""

    federation: str
    run: str
    client: str
    sealed: str = Field(description="base64")
    signature: str = Field(description="base64")


class Ticket(Answer):
    """For the second seed of a client's mask, to be shown to the shuffler."""

    ticket: str = Field(pattern="^[0-9a-f]{32}$")
    signature: str = Field(pattern="^[0-9a-f]{128}$")


class Revoked(Answer):
    federation: str
    serial: int = Field(ge=0)
    clients: list[str]
    signature: str = Field(description="base64")


def collect_metrics(server: KeyServer) -> None:
    """How many clients there are, by state, and when the first credential in force ends."""
    clients = server.clients()
    states = {
        "revoked": [client for client in clients if client.revoked],
        "enrolled": [client for client in clients if client.enrolled and not client.revoked],
        "expected": [client for client in clients if not (client.enrolled or client.revoked)],
    }
    for state, found in states.items():
        METRICS.set("ntkfl_key_server_clients", len(found), state=state)
    ends = [client.ends for client in states["enrolled"] if client.ends is not None]
    if ends:
        METRICS.set("ntkfl_credential_end_seconds", min(ends))


def key_server_app(server: KeyServer) -> FastAPI:
    """`POST /v1/enrol`, `POST /v1/renew` and `POST /v1/runs/{run}/seed` (signed, empty body), `GET /v1/revoked`; and as
    a second holder of masks `POST /v1/runs/{run}/masks` (signed) and `POST /v1/runs/{run}/masks/release`.
    """

    def admit(scope: Scope) -> tuple[str, int]:
        return "", MAX_RELEASED if scope["path"].endswith("/masks/release") else MAX_BODY

    def ready() -> None:
        server.runs()

    app = service_app("key-server", max_body=MAX_RELEASED, admit=admit, ready=ready)

    @app.post("/v1/enrol", responses=refusals(403, 409))
    def enrol(request: Request, body: Enrolment) -> Issued:
        issued = server.enrol(body.token, body.client, body.sealing_key, body.signing_key, body.proof)
        request.state.client = body.client
        log("enrolled", client=body.client)
        return Issued(credential=issued)

    @app.post("/v1/renew", dependencies=[SIGNED], responses=refusals(401, 403))
    async def renew(request: Request) -> Issued:
        credential = await authenticate(request, server.public, server.federation, allow_expired=True)
        issued = await run_in_threadpool(server.renew, credential)
        log("renewed", client=credential.client)
        return Issued(credential=issued)

    @app.post("/v1/runs/{run}/seed", dependencies=[SIGNED], responses=refusals(401, 403, 404))
    async def run_secret(request: Request, run: str) -> SealedSecret:
        credential = await authenticate(request, server.public, server.federation)
        return SealedSecret(**await run_in_threadpool(server.run_secret, credential, run))

    @app.post(
        "/v1/runs/{run}/masks", dependencies=[SIGNED], responses=refusals(401, 403, 404, 409, 410), openapi_extra=_SEED
    )
    async def take_seed(request: Request, run: str) -> Ticket:
        credential = await authenticate(request, server.public, server.federation)
        try:
            announced, (seed,) = unpack_rows(await request.body(), max_rows=1, row_bytes=SEED_BYTES)
        except MessageError as error:
            raise Refused("malformed", str(error)) from None
        given = await run_in_threadpool(server.take_seed, credential, run, announced, seed)
        return Ticket(ticket=given[0].hex(), signature=given[1].hex())

    @app.post(
        "/v1/runs/{run}/masks/release",
        response_class=Response,
        responses=refusals(403, 404, 410) | _MASKS,
        openapi_extra=_RELEASED,
    )
    async def release_masks(request: Request, run: str) -> Response:
        masks = await run_in_threadpool(server.release_masks, run, await request.body())
        log("masks", bytes=len(masks))
        return Response(masks, media_type=BINARY)

    @app.get("/v1/revoked")
    def revoked() -> Revoked:
        return Revoked.model_validate(server.revoked())

    return app
