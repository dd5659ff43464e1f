"""Refusals over HTTP: the status that each reason has, the one shape of their bodies, and how they are documented."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ntkfl.errors import Refused
from ntkfl.extras import missing
from ntkfl.services.http.schemas import Problem
from ntkfl.services.http.signing import Unauthenticated

try:
    from starlette.responses import JSONResponse
except ImportError as error:  # the core works without; this room does not
    raise missing("a service", "services") from error

RETRY_AFTER_S = 1  # until a client that gets a 429 or 503 may ask again

# Reasons that a service raises, by status, with the text of the OpenAPI document.
_STATUSES: dict[int, tuple[str, tuple[str, ...]]] = {
    400: ("the body cannot be parsed, or has two lengths", ("two-lengths",)),
    401: ("no valid signature of a client of this federation", ()),  # every `Unauthenticated`
    403: (
        "not for this client: revoked, not asked, not in that role, or too few clients",
        (
            "bad-token", "below-floor", "ended", "not-asked", "not-evaluator", "revoked", "unknown-client", "unsigned",
        ),
    ),
    404: ("no such run or batch here", ("unknown-batch", "unknown-run")),
    408: ("the body came too slowly", ("too-slow",)),
    409: (
        "here already, or against what was announced",
        ("already-enrolled", "backwards", "not-begun", "other-announcement", "other-cohort", "other-kind",
         "replayed"),
    ),
    410: ("over: released, cancelled or deleted", ("cancelled", "forgotten", "late")),
    413: ("the body is larger than this request allows", ("too-large",)),
    422: ("not what was expected; the message says where", ("invalid", "invalid-key", "malformed", "row-count",
                                                            "row-size", "terms")),
    425: ("not ready: too few have sent their rows", ("not-ready",)),
    429: ("too many requests of this client under way; retry later", ("too-many",)),
    503: ("cannot be served now; retry later", ("busy", "no-state", "storage")),
}  # fmt: skip
STATUS_OF = {reason: status for status, (_, reasons) in _STATUSES.items() for reason in reasons}
ANY_REQUEST = (400, 408, 413, 422, 503)  # what any request can meet


def refusal_response(refused: Refused, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """A refusal as it travels. A reason without a status is a mistake of the service's own: `KeyError`."""
    status = 401 if isinstance(refused, Unauthenticated) else STATUS_OF[refused.reason]
    return error_response(status, refused.reason, str(refused), headers)


def error_response(status: int, reason: str, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """`{"error": reason, "message": line}`; with 429 and 503, when to retry."""
    retry = {"retry-after": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    return JSONResponse({"error": reason, "message": " ".join(message.split())}, status, retry | dict(headers or {}))


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """These statuses for FastAPI's `responses`."""
    return {status: {"model": Problem, "description": _STATUSES[status][0]} for status in statuses}
