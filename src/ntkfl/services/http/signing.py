"""Requests that a client signs: the headers that prove who asks, and how a service checks them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping

from ntkfl.crypto.context import bind
from ntkfl.crypto.credentials import Credential, Expired
from ntkfl.crypto.hpke import SigningKey, parse_key, verify
from ntkfl.errors import NTKFLError, Refused

CREDENTIAL_HEADER, DIGEST_HEADER, SIGNATURE_HEADER = "ntkfl-credential", "ntkfl-digest", "ntkfl-signature"
_REQUEST = "ntkfl request v1"


class Unauthenticated(Refused):
    """A request without a valid signature of a client of this federation."""


def sign_request(issued: str, key: SigningKey, method: str, path: str, body: bytes) -> dict[str, str]:
    """Headers that prove who asks: the credential, the body's SHA-256, and a signature over method, path and digest."""
    digest = hashlib.sha256(body).digest()
    signature = key.sign(_payload(method, path, digest), bind(_REQUEST))
    return {
        CREDENTIAL_HEADER: issued,
        DIGEST_HEADER: digest.hex(),
        SIGNATURE_HEADER: base64.b64encode(signature).decode(),
    }


def check_headers(
    headers: Mapping[str, str],
    key_server: bytes,
    federation: str,
    method: str,
    path: str,
    *,
    allow_expired: bool = False,
) -> tuple[Credential, bytes]:
    """The credential of the client that asks and the SHA-256 that the body must have, before a byte of it is read.

    `Unauthenticated` if the signature does not hold or the credential has ended. `path` includes the query; names of
    `headers` are in lower case.
    """
    given = [headers.get(name) for name in (CREDENTIAL_HEADER, DIGEST_HEADER, SIGNATURE_HEADER)]
    if None in given:
        needed = f"{CREDENTIAL_HEADER}, {DIGEST_HEADER} or {SIGNATURE_HEADER}"
        raise Unauthenticated("unsigned", f"the request lacks {needed}")
    issued, digest, signature = map(str, given)
    try:
        credential = Credential.check(issued, key_server, federation, allow_expired=allow_expired)
        expected = parse_key(digest, DIGEST_HEADER)
        raw = base64.b64decode(signature, validate=True)
        verify(bytes.fromhex(credential.signing_key), raw, _payload(method, path, expected), bind(_REQUEST))
    except Expired as error:
        raise Unauthenticated("ended", f"{error}; its holder renews it at the key server") from None
    except (NTKFLError, ValueError) as error:
        raise Unauthenticated("unauthenticated", f"the request cannot be believed: {error}") from None
    return credential, expected


def check_request(
    headers: Mapping[str, str],
    key_server: bytes,
    federation: str,
    method: str,
    path: str,
    body: bytes,
    *,
    allow_expired: bool = False,
) -> Credential:
    """The credential, as `check_headers` gives it, if the body is the one that was signed; else `Unauthenticated`.

    Whoever recorded a request can repeat it, so what it asks for must be safe to repeat.
    """
    credential, digest = check_headers(headers, key_server, federation, method, path, allow_expired=allow_expired)
    if hashlib.sha256(body).digest() != digest:
        line = "the request cannot be believed: its body is not the one that was signed"
        raise Unauthenticated("unauthenticated", line)
    return credential


def _payload(method: str, path: str, digest: bytes) -> bytes:
    return bind(method.upper(), path, digest)
