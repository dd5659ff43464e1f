"""The base of every service's application: `/health` and `/ready`, one shape of errors, bounded and signed requests."""

from __future__ import annotations

import http
import re
from collections.abc import Callable

from ntkfl.crypto.credentials import Credential
from ntkfl.errors import Refused
from ntkfl.extras import missing
from ntkfl.services.http.refusals import error_response, refusal_response
from ntkfl.services.http.signing import check_request
from ntkfl.version import __version__

try:
    from fastapi import FastAPI, Request, Response
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException
    from starlette.types import Lifespan, Scope

    from ntkfl.services.http.body_limits import Admit, BodyLimits
except ImportError as error:  # the core works without; this room does not
    raise missing("a service", "services") from error

RECEIVE_S = 60.0  # for one body to arrive
SEND_S = 60.0  # for a reader to take one piece of an answer
BINARY = "application/octet-stream"


def service_app(
    title: str,
    *,
    max_body: int,
    receive_s: float = RECEIVE_S,
    send_s: float = SEND_S,
    max_held: int | None = None,
    admit: Admit | None = None,
    lifespan: Lifespan[FastAPI] | None = None,
    ready: Callable[[], None] = lambda: None,
) -> FastAPI:
    """An application with `GET /health` (the process answers) and `GET /ready` (it can serve: `ready` returns, or
    raises `Refused`), errors as `{"error": reason, "message": line}`, and bounded requests.

    A handler raises `Refused`. For `admit` and the bounds see `BodyLimits`; all bodies together may hold 16 bodies, or
    64 MiB if that is more, unless `max_held` says otherwise. A handler that knows the client sets
    `request.state.client = name`, for the log. No service serves a description of itself.
    """
    held = max(16 * max_body, 64 << 20) if max_held is None else max_held
    # A redirect would go wherever the request's Host header says.
    app = FastAPI(title=title, openapi_url=None, redirect_slashes=False, lifespan=lifespan)
    app.add_middleware(
        BodyLimits, service=title, max_body=max_body, max_held=held, receive_s=receive_s, send_s=send_s, admit=admit
    )

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        request.state.refused = error.reason
        return refusal_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        request.state.refused = "invalid"
        return error_response(422, "invalid", _what_is_invalid(error))

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        reason = re.sub("[^a-z]+", "-", http.HTTPStatus(error.status_code).phrase.lower())
        return error_response(error.status_code, reason, str(error.detail), error.headers)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "service": title, "version": __version__}

    @app.get("/ready")
    def is_ready() -> dict[str, str]:
        ready()
        return {"status": "ok", "service": title, "version": __version__}

    return app


def _what_is_invalid(error: RequestValidationError) -> str:
    """Where and why, without a word of the input, which may hold secrets."""
    first = error.errors()[0]
    place = first["loc"][:-1] if first["type"] == "extra_forbidden" else first["loc"]  # an unknown name is input too
    return f"{'.'.join(map(str, place)) or 'request'}: {first['type'].replace('_', ' ')}"


def target(scope: Scope) -> str:
    """The path and query as they were asked for, which is what is signed."""
    path, query = str(scope["raw_path"], "latin-1"), str(scope["query_string"], "latin-1")
    return f"{path}?{query}" if query else path


async def authenticate(
    request: Request, key_server: bytes, federation: str, *, allow_expired: bool = False
) -> Credential:
    """The credential of the client that signed this request; `Unauthenticated` without one."""
    asked = request.method, target(request.scope), await request.body()
    credential = check_request(request.headers, key_server, federation, *asked, allow_expired=allow_expired)
    request.state.client = credential.client
    return credential
