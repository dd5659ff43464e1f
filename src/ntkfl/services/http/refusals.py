"""Refusals over HTTP: the status that each reason has, and the one shape of their bodies."""

from __future__ import annotations

from collections.abc import Mapping

from ntkfl.errors import Refused
from ntkfl.extras import missing
from ntkfl.services.http.signing import Unauthenticated

try:
    from starlette.responses import JSONResponse
except ImportError as error:  # the core works without; this room does not
    raise missing("a service", "services") from error

RETRY_AFTER_S = 1  # until a client that gets a 503 may ask again
_REASONS = {
    400: ("two-lengths",),
    # 401: every `Unauthenticated`
    403: (
        "bad-token", "below-floor", "ended", "not-asked", "not-evaluator", "revoked", "unknown-client", "unsigned",
    ),
    404: ("unknown-batch", "unknown-run"),
    408: ("too-slow",),
    409: (
        "already-enrolled", "backwards", "not-begun", "other-announcement", "other-cohort", "other-kind", "replayed",
    ),
    410: ("cancelled", "forgotten", "late"),
    413: ("too-large",),
    422: ("invalid", "invalid-key", "malformed", "row-count", "row-size", "terms"),
    425: ("not-ready",),
    503: ("busy", "no-state", "storage"),
}  # fmt: skip
STATUS_OF = {reason: status for status, reasons in _REASONS.items() for reason in reasons}


def refusal_response(refused: Refused, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """A refusal as it travels. A reason without a status is a mistake of the service's own: `KeyError`."""
    status = 401 if isinstance(refused, Unauthenticated) else STATUS_OF[refused.reason]
    return error_response(status, refused.reason, str(refused), headers)


def error_response(status: int, reason: str, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """`{"error": reason, "message": line}`; with 503, when to retry."""
    retry = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else {}
    return JSONResponse({"error": reason, "message": " ".join(message.split())}, status, retry | dict(headers or {}))
