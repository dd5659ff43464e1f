"""What the services' OpenAPI documents say besides the routes: answers, refusals, and what travels as bytes.

No service serves its own: `key_server_app(...).openapi()` and the like give it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ntkfl.crypto.credentials import CREDENTIAL_HEADER, DIGEST_HEADER, SIGNATURE_HEADER
from ntkfl.errors import ConfigError

try:
    from fastapi import Response
except ImportError as error:  # the core works without; this room does not
    raise ConfigError("services need the extra 'services': pip install 'ntkfl[services]'") from error

BINARY = "application/octet-stream"
Responses = dict[int | str, dict[str, Any]]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Problem(_Answer):
    """Every refusal."""

    error: str = Field(pattern="^[a-z-]+$", description="one word for programs")
    message: str = Field(description="one line for people")


class Health(_Answer):
    status: Literal["ok"]
    service: str
    version: str


class Issued(_Answer):
    credential: str = Field(description="base64 of a signature and what it signs")


class SealedSeed(_Answer):
    """The run's ρ, sealed to the client that asked."""

    federation: str
    run: str
    client: str
    sealed: str = Field(description="base64")
    signature: str = Field(description="base64")


class Revoked(_Answer):
    federation: str
    serial: int = Field(ge=0)
    clients: list[str]
    signature: str = Field(description="base64")


class Said(_Answer):
    status: str


class Receipt(_Answer):
    status: Literal["received"]
    receipt: str = Field(pattern="^[0-9a-f]{128}$", description="the shuffler's signature, hexadecimal")


class Clients(_Answer):
    clients: list[str]


class Latest(_Answer):
    sequence: int = Field(ge=0, description="of the newest announcement; 0: none yet")
    key: Annotated[list[int], Field(min_length=2, max_length=2)] | None = Field(description="its round and exchange")


class Sequence(_Answer):
    sequence: int = Field(ge=1)


class BatchStatus(_Answer):
    state: Literal["open", "ready", "released", "cancelled"]
    clients: int = Field(ge=0)
    rows: int | None = Field(description="once it is released")
    seconds: float | None = Field(description="until the deadline, while there is one to wait for")
    missing: list[str] = Field(description="who keeps a later exchange from its release, after its deadline")


class Reports(_Answer):
    reports: list[str] = Field(description="base64, sealed to the aggregator")


_REASONS = {
    400: "the body cannot be parsed, or has two lengths",
    401: "nobody signed this, or nobody of this federation",
    403: "not for the one who asks: revoked, not asked, not in that role, or a crowd too small",
    404: "no such run or batch here",
    408: "the body came too slowly",
    409: "here already, or against what was announced",
    410: "over: released, cancelled or deleted",
    413: "larger than what this asks for can be",
    422: "not what was expected; the message says where",
    425: "not ready: too few have sent their rows",
    503: "cannot be served now; ask again",
}


def refusals(*statuses: int) -> Responses:
    """These, and those that any request can meet."""
    return {
        status: {"model": Problem, "description": _REASONS[status]}
        for status in sorted({*statuses, 400, 408, 413, 503})
    }


def signed() -> dict[str, Any]:
    """A request that a client signs; who asks without is refused."""
    about = {"in": "header", "schema": {"type": "string"}}
    return {
        "parameters": [
            about | {"name": CREDENTIAL_HEADER, "description": "the key server's word for the client"},
            about | {"name": DIGEST_HEADER, "description": "the body's SHA-256, in hexadecimal"},
            about | {"name": SIGNATURE_HEADER, "description": "the client's, over method, path and that digest"},
        ]
    }


def takes_bytes(what: str) -> dict[str, Any]:
    """A request whose body is no JSON."""
    content = {BINARY: {"schema": {"type": "string", "format": "binary"}}}
    return {"requestBody": {"required": True, "description": what, "content": content}}


def gives_bytes(what: str, headers: tuple[str, ...] = ()) -> dict[str, Any]:
    """A response whose body is no JSON, and the numbers in its headers."""
    numbers = {name: {"required": True, "schema": {"type": "integer", "minimum": 1}} for name in headers}
    content = {BINARY: {"schema": {"type": "string", "format": "binary"}}}
    return {"description": what, "content": content} | ({"headers": numbers} if numbers else {})


def _route(answer: type[_Answer], *statuses: int, **extra: Any) -> dict[str, Any]:
    return {"response_model": answer, "responses": refusals(*statuses)} | ({"openapi_extra": extra} if extra else {})


def _bytes_route(answers: Responses, *statuses: int, **extra: Any) -> dict[str, Any]:
    about = {"response_class": Response, "responses": refusals(*statuses) | answers}
    return about | ({"openapi_extra": extra} if extra else {})


# What FastAPI is told of every route, by the service and the name of the handler.
_ROWS, _REPORT = "rows in their frame, each sealed to the aggregator", "one row in its frame, sealed to the aggregator"
_ANNOUNCED: Responses = {
    200: gives_bytes("what the aggregator announced and signed", ("ntkfl-sequence", "ntkfl-newest")),
    204: {"description": "nothing newer yet; ask again"},
}
KEY_SERVER = {
    "enrol": _route(Issued, 400, 403, 409, 422),
    "renew": _route(Issued, 401, 403, **signed()),
    "seed": _route(SealedSeed, 401, 403, 404, 422, **signed()),
    "revoked": _route(Revoked),
}
SHUFFLER = {
    "hello": _route(Said, 401, 403, 404, 422, **signed()),
    "announcement": _bytes_route(_ANNOUNCED, 401, 403, 404, 422, **signed()),
    "rows": _route(Receipt, 401, 403, 404, 409, 410, 422, **signed(), **takes_bytes(_ROWS)),
    "reports": _route(Receipt, 401, 403, 404, 409, 422, **signed(), **takes_bytes(_REPORT)),
}
AGGREGATOR = {
    "clients": _route(Clients, 404, 422),
    "latest": _route(Latest, 404, 422),
    "announcements": _route(Sequence, 403, 404, 409, 422, **takes_bytes("an announcement that the aggregator signed")),
    "status": _route(BatchStatus, 404, 422),
    "release": _bytes_route({200: gives_bytes("the batch's rows, permuted, in their frame")}, 404, 410, 422, 425),
    "cancel": _route(Said, 404, 422),
    "forget": _route(Said, 404, 422, 425),
    "batch_reports": _route(Reports, 404, 422),
}
