"""The key server over HTTP: enrols clients, and gives each of them the secret ρ of a run, sealed to it.

POST /v1/enrol            a token and public keys; anybody may ask, so the body is small and has five seconds
POST /v1/runs/RUN/secret  signed by an enrolled client
GET  /v1/revoked          the names of revoked clients
"""

from __future__ import annotations

import logging
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ntkfl.errors import Refused
from ntkfl.safe_parse import parse_json
from ntkfl.services.key_server.store import KeyServer
from ntkfl.services.web import SignedRequest, read_body, serve, service_app

MOST_ENROLMENT, ENROLMENT_S = 2048, 5.0  # bytes, and seconds for them to arrive
_FIELDS = ("token", "client", "sealing_key", "signing_key")
_logger = logging.getLogger("ntkfl.services")


def serve_key_server(folder: Path, host: str | None = None, port: int | None = None) -> None:
    """Serve the state in `folder` until told to stop."""
    server = KeyServer(folder)
    serve("key-server", key_server_app(server), folder, server.peers.key_server.url, host, port)


def key_server_app(server: KeyServer) -> Starlette:
    async def enrol(request: Request) -> Response:
        body = await read_body(request, MOST_ENROLMENT, ENROLMENT_S)
        try:
            values = parse_json(body.decode())
            if values.keys() != set(_FIELDS) or not all(isinstance(value, str) for value in values.values()):
                raise ValueError
        except (ValueError, AttributeError):
            raise Refused("malformed", f"an enrolment has the texts {', '.join(_FIELDS)}, and nothing else") from None
        issued = await run_in_threadpool(server.enrol, *(values[name] for name in _FIELDS))
        _logger.info("enrolled %s", values["client"])
        return JSONResponse({"credential": issued})

    async def run_secret(request: Request) -> Response:
        signed = SignedRequest(request, server.peers)
        await signed.body()
        return JSONResponse(await run_in_threadpool(server.run_secret, signed.client, request.path_params["run"]))

    async def revoked(_: Request) -> Response:
        return JSONResponse(await run_in_threadpool(server.revoked))

    routes = [
        Route("/v1/enrol", enrol, methods=["POST"]),
        Route("/v1/runs/{run}/secret", run_secret, methods=["POST"]),
        Route("/v1/revoked", revoked, methods=["GET"]),
    ]
    return service_app("key-server", routes, server.check)
