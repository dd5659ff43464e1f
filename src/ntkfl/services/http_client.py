"""The HTTP client of a service, over TLS. Requests are retried while a service cannot be reached, and after the time it
asks for where it is too busy; a refusal is final. No more is read of an answer than the request allows.
"""

from __future__ import annotations

import logging
import random
import ssl
import time
from pathlib import Path
from typing import Self

from ntkfl.crypto.certificates import CA
from ntkfl.crypto.hpke import SigningKey
from ntkfl.errors import MessageError, Refused, TrustError
from ntkfl.extras import missing
from ntkfl.services.signing import sign_request

try:
    import httpx
except ImportError as error:
    raise missing("a service", "services") from error

RETRY_STATUSES = (502, 503, 504)
SMALL = 64 << 10  # bytes of an answer of a few fields
_MAX_RETRY_AFTER_S = 60.0  # whatever a service asks for
_LONGEST_PAUSE_S = 2.0
_logger = logging.getLogger("ntkfl.services")


class HttpClient:
    """A service at `url`, trusted by the certificates in the folder's `ca.pem` alone."""

    def __init__(self, url: str, folder: Path, patience: float = 60, timeout: float = 60) -> None:
        try:
            context = ssl.create_default_context(cafile=str(folder / CA))
        except (OSError, ssl.SSLError) as error:
            raise TrustError(f"cannot use the certificates in {folder / CA}: {error}") from None
        self.url, self.patience = url.rstrip("/"), patience
        limits = httpx.Timeout(timeout, connect=min(5, timeout))
        self._http = httpx.Client(base_url=self.url, verify=context, timeout=limits)
        self._signs: tuple[str, SigningKey] | None = None

    def identify(self, credential: str, key: SigningKey) -> Self:
        """Sign requests from now on."""
        self._signs = credential, key
        return self

    def ask(self, method: str, path: str, body: bytes = b"", most: int = SMALL) -> httpx.Response:
        """The answer to one request, retried for `patience` seconds. `Refused` as the service refuses, or if it cannot
        be reached; `MessageError` if the answer has more than `most` bytes.
        """
        until, pause = time.monotonic() + self.patience, 0.1
        while True:
            request = self._http.build_request(method, path, content=body or None)
            request.headers["accept-encoding"] = "identity"
            if self._signs is not None:
                path_asked = request.url.raw_path.decode()
                request.headers["authorization"] = sign_request(*self._signs, method, path_asked, body)
            late, later = time.monotonic() > until, 0.0
            try:
                response = self._send(request, most)
                if response.status_code not in RETRY_STATUSES or late:
                    return _accept(response)
                asked = response.headers.get("retry-after", "")
                later = min(float(asked), _MAX_RETRY_AFTER_S) if asked.isdecimal() and asked.isascii() else 0.0
                problem = f"cannot answer now (status {response.status_code})"
            except httpx.TransportError as error:
                problem = f"cannot be reached ({error or type(error).__name__})"
                if late:
                    raise Refused("unreachable", f"{self.url} {problem}") from None
            if pause == _LONGEST_PAUSE_S:  # it is more than a restart
                _logger.warning("%s %s; tries again, %.0f s more at most", self.url, problem, until - time.monotonic())
            time.sleep(max(pause, later) * random.uniform(1, 1.5))  # clients refused together retry apart
            pause = min(_LONGEST_PAUSE_S, 2 * pause)

    def _send(self, request: httpx.Request, most: int) -> httpx.Response:
        """The answer with its body, read piece by piece so that one too large is never held."""
        response = self._http.send(request, stream=True)
        body = bytearray()
        try:
            if response.headers.get("content-encoding", "identity") != "identity":  # a few bytes that become many
                raise MessageError(f"{self.url} answers with packed bytes, which this request does not allow")
            for piece in response.iter_raw():
                body += piece
                if len(body) > most:
                    raise MessageError(f"{self.url} answers with more than the {most} bytes that it may have")
        finally:
            response.close()
        return httpx.Response(response.status_code, headers=response.headers, content=bytes(body), request=request)


def _accept(response: httpx.Response) -> httpx.Response:
    """The answer, or `Refused` with the service's own reason; a proxy's page has none."""
    if response.is_success:
        return response
    try:
        answer = response.json()
        reason, message = str(answer["error"]), str(answer["message"])
    except (ValueError, KeyError, TypeError):
        reason, message = "refused", f"status {response.status_code}"
    raise Refused(reason, message)
