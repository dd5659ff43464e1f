"""The key server over HTTP: enrols clients, and gives each of them the secret ρ of a training run, sealed to it."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field

from ntkfl.crypto.credentials import NAME_PATTERN
from ntkfl.services.http.application import authenticate, service_app
from ntkfl.services.key_server.store import KeyServer
from ntkfl.services.log import log
from ntkfl.services.trusted_peers import HEX_KEY

MAX_BODY = 16 << 10  # of a request


class Enrolment(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    token: str = Field(min_length=1, max_length=200)
    client: str = Field(pattern=NAME_PATTERN)
    sealing_key: str = Field(pattern=HEX_KEY)
    signing_key: str = Field(pattern=HEX_KEY)
    proof: str = Field(pattern="^[0-9a-f]{128}$")


def key_server_app(server: KeyServer) -> FastAPI:
    """`POST /v1/enrol`, `POST /v1/renew` and `POST /v1/runs/{run}/seed` (signed, empty body), `GET /v1/revoked`."""

    def ready() -> None:
        server.runs()

    app = service_app("key-server", max_body=MAX_BODY, ready=ready)

    @app.post("/v1/enrol")
    def enrol(request: Request, body: Enrolment) -> dict[str, str]:
        issued = server.enrol(body.token, body.client, body.sealing_key, body.signing_key, body.proof)
        request.state.client = body.client
        log("enrolled", client=body.client)
        return {"credential": issued}

    @app.post("/v1/renew")
    async def renew(request: Request) -> dict[str, str]:
        credential = await authenticate(request, server.public, server.federation, allow_expired=True)
        issued = await run_in_threadpool(server.renew, credential)
        log("renewed", client=credential.client)
        return {"credential": issued}

    @app.post("/v1/runs/{run}/seed")
    async def run_secret(request: Request, run: str) -> dict[str, str]:
        credential = await authenticate(request, server.public, server.federation)
        return await run_in_threadpool(server.run_secret, credential, run)

    @app.get("/v1/revoked")
    def revoked() -> dict[str, object]:
        return server.revoked()

    return app
