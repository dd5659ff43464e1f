"""The HTTP client of a service, over TLS. Requests are retried while a service cannot be reached, and after the time it
asks for where it is too busy; a refusal is final. No more is read of an answer than the request allows.
"""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from ntkfl.atomic import check_private
from ntkfl.crypto.hpke import SigningKey
from ntkfl.errors import MessageError, Refused, TrustError
from ntkfl.extras import missing
from ntkfl.services.http.signing import sign_request
from ntkfl.services.log import log, warn

try:
    import httpx
except ImportError as error:
    raise missing("a service", "services") from error

RETRY_STATUSES = (502, 503, 504)
SMALL, MANY, ANNOUNCED = 64 << 10, 16 << 20, 256 << 20  # bytes of an answer: a few fields, a list, an announcement
_MAX_RETRY_AFTER_S = 60.0  # whatever a service asks for
_SAY_S = 10.0  # between two lines about a service that is still not there
_UNPACKED = {"accept-encoding": "identity"}


class HttpClient:
    """A service at `url`, trusted by the certificate authority in `ca` alone.

    A client signs what it asks with its credential and key (`identify`); the aggregator shows a TLS certificate.
    """

    def __init__(
        self,
        url: str,
        ca: Path,
        certificate: tuple[Path, Path] | None = None,
        patience: float = 60,
        timeout: float = 60,
    ) -> None:
        try:
            context = ssl.create_default_context(cafile=str(ca))
            if certificate is not None:
                context.load_cert_chain(*map(str, certificate))
        except (OSError, ssl.SSLError) as error:
            raise TrustError(f"cannot use the certificates beside {ca}: {error}") from None
        if certificate is not None:
            check_private(certificate[1])
        self.url, self.patience = url.rstrip("/"), patience
        self._http = httpx.Client(
            base_url=self.url, verify=context, timeout=httpx.Timeout(timeout, connect=min(5, timeout))
        )
        self._credential: tuple[str | Callable[[], str], SigningKey] | None = None

    def identify(self, credential: str | Callable[[], str], key: SigningKey) -> Self:
        """Sign requests from now on; a function is asked for the credential each time, as it may be renewed."""
        self._credential = (credential, key)
        return self

    def ask(self, method: str, path: str, body: bytes = b"", json: object = None, most: int = SMALL) -> httpx.Response:
        """The answer to one request, retried for `patience` seconds. `Refused` as the service refuses, or if it cannot
        be reached; `MessageError` if the answer has more than `most` bytes.
        """
        until = time.monotonic() + self.patience
        pause, said = 0.1, 0.0
        while True:
            request = self._http.build_request(method, path, content=body or None, json=json, headers=_UNPACKED)
            if self._credential is not None:
                credential, key = self._credential
                issued = credential if isinstance(credential, str) else credential()
                target = request.url.raw_path.decode()
                request.headers.update(sign_request(issued, key, method, target, request.content))
            later = 0.0
            try:
                response = self._send(request, most)
            except httpx.TransportError as error:
                if time.monotonic() > until:
                    reason = str(error) or type(error).__name__
                    raise Refused("unreachable", f"{self.url} cannot be reached: {reason}") from None
                problem = f"cannot be reached ({error or type(error).__name__})"
            else:
                if response.status_code not in RETRY_STATUSES or time.monotonic() > until:
                    if said:
                        log(f"{self.url} answers again")
                    return _accept(response)
                later, problem = retry_after(response), f"cannot answer now (status {response.status_code})"
            now = time.monotonic()
            if now > said + _SAY_S:
                said = now
                warn(f"{self.url} {problem}; tries again, {max(0.0, until - now):.0f} s more at most")
            time.sleep(max(pause, later) * random.uniform(1, 1.5))  # clients refused together retry apart
            pause = min(2.0, 2 * pause)

    def _send(self, request: httpx.Request, most: int) -> httpx.Response:
        response = self._http.send(request, stream=True)
        try:
            body = bytearray()
            check_answer(response, most, 0)
            for piece in response.iter_raw():
                body += piece
                check_answer(response, most, len(body))
        finally:
            response.close()
        return httpx.Response(response.status_code, headers=response.headers, content=bytes(body), request=request)

    def close(self) -> None:
        self._http.close()


def check_answer(response: httpx.Response, most: int, size: int) -> None:
    """`MessageError` if an answer of which `size` bytes have come is larger than `most`, declares to be, or is packed:
    a few bytes that become many.
    """
    said = response.headers.get("content-length", "0")
    announced = int(said) if said.isascii() and said.isdecimal() and len(said) < 19 else most + 1
    if max(size, announced) > most:
        raise MessageError(f"{response.url} answers with more than the {most} bytes that it may have")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise MessageError(f"{response.url} answers with packed bytes, which this request does not allow")


def retry_after(response: httpx.Response) -> float:
    """Seconds after which the service asks for a retry; 0 where it does not say."""
    said = response.headers.get("retry-after", "")
    return min(float(said), _MAX_RETRY_AFTER_S) if said.isdecimal() and said.isascii() else 0.0


def _accept(response: httpx.Response) -> httpx.Response:
    if response.is_success:
        return response
    try:
        answer = response.json()
        reason, message = str(answer["error"]), str(answer["message"])
    except (ValueError, KeyError, TypeError):
        reason, message = "refused", f"status {response.status_code}"
    raise Refused(reason, message)
