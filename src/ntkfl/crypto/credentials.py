"""Who somebody is: a credential the key server signed, and requests its holder signs.

The key server vouches for a client's two public keys in a `Credential`, for a time. Whoever pins the key server's
signing key can check it without asking anybody; the holder proves to be its owner by signing each request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from ntkfl.crypto.hpke import SigningKey, bind, parse_key, verify
from ntkfl.errors import NTKFLError, Refused, TrustError

ROLES = ("client", "evaluator")
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"  # of a federation, a run or a client
_CREDENTIAL, _REQUEST = "ntkfl credential v2", "ntkfl request v1"
_LAST = 1 << 40  # seconds since 1970; later than that is no date
CREDENTIAL_HEADER, DIGEST_HEADER, SIGNATURE_HEADER = "ntkfl-credential", "ntkfl-digest", "ntkfl-signature"


class Ended(TrustError):
    """A credential that was good once."""


@dataclass(frozen=True)
class Credential:
    """The key server's word for a client, good until `ends`. Keys are hexadecimal, times seconds since 1970."""

    federation: str
    client: str
    role: str
    sealing_key: str
    signing_key: str
    issued: int
    ends: int

    def payload(self) -> bytes:
        """What is signed: JSON with sorted keys and no spaces."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    def issue(self, key: SigningKey) -> str:
        """The credential as it travels: base64 of the signature (64 bytes) and the payload."""
        signature = key.sign(self.payload(), bind(_CREDENTIAL, self.federation))
        return base64.b64encode(signature + self.payload()).decode()

    @property
    def renew_from(self) -> float:
        """When its holder begins to ask for the next one: a third of its time is left for that to succeed."""
        return self.issued + 2 / 3 * (self.ends - self.issued)

    @classmethod
    def check(cls, issued: str, key_server: bytes, federation: str, *, ended_too: bool = False) -> Self:
        """The credential, if the key server of this federation signed it and it has not ended (or that does not
        matter); `TrustError` otherwise.
        """
        try:
            raw = base64.b64decode(issued, validate=True)
            signature, payload = raw[:64], raw[64:]
            values: Any = json.loads(payload)
            credential = cls(**values)
        except (ValueError, TypeError, UnicodeDecodeError, RecursionError):
            raise TrustError("not a credential") from None
        verify(key_server, signature, payload, bind(_CREDENTIAL, federation))
        if credential.federation != federation or credential.role not in ROLES or credential.payload() != payload:
            raise TrustError("a credential of another federation or role")
        parse_key(credential.sealing_key, "the credential's sealing key")
        parse_key(credential.signing_key, "the credential's signing key")
        if not all(type(moment) is int and 0 <= moment <= _LAST for moment in (credential.issued, credential.ends)):
            raise TrustError("a credential without an end")
        if not ended_too and time.time() >= credential.ends:
            raise Ended(f"the credential of {credential.client!r} ended at {as_date(credential.ends)}")
        return credential


def as_date(seconds: float) -> str:
    """A moment as people write it, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))


def sign_request(issued: str, key: SigningKey, method: str, path: str, body: bytes) -> dict[str, str]:
    """Headers that prove who asks: the credential, the body's SHA-256, and a signature over method, path and digest."""
    digest = hashlib.sha256(body).digest()
    signature = key.sign(_request_payload(method, path, digest), bind(_REQUEST))
    return {
        CREDENTIAL_HEADER: issued,
        DIGEST_HEADER: digest.hex(),
        SIGNATURE_HEADER: base64.b64encode(signature).decode(),
    }


def check_headers(
    headers: Mapping[str, str], key_server: bytes, federation: str, method: str, path: str, *, ended_too: bool = False
) -> tuple[Credential, bytes]:
    """Who asks, and the SHA-256 that the body must have, before a byte of it is read; `Refused` with 401 if that cannot
    be believed, or the credential has ended. `path` includes the query; `headers` are in lower case.
    """
    given = [headers.get(name) for name in (CREDENTIAL_HEADER, DIGEST_HEADER, SIGNATURE_HEADER)]
    if None in given:
        needed = f"{CREDENTIAL_HEADER}, {DIGEST_HEADER} or {SIGNATURE_HEADER}"
        raise Refused(401, "unsigned", f"the request lacks {needed}")
    issued, digest, signature = map(str, given)
    try:
        credential = Credential.check(issued, key_server, federation, ended_too=ended_too)
        expected = parse_key(digest, DIGEST_HEADER)
        raw = base64.b64decode(signature, validate=True)
        verify(bytes.fromhex(credential.signing_key), raw, _request_payload(method, path, expected), bind(_REQUEST))
    except Ended as error:
        raise Refused(401, "ended", f"{error}; its holder renews it at the key server") from None
    except (NTKFLError, ValueError) as error:
        raise Refused(401, "unauthenticated", f"the request cannot be believed: {error}") from None
    return credential, expected


def check_request(
    headers: Mapping[str, str],
    key_server: bytes,
    federation: str,
    method: str,
    path: str,
    body: bytes,
    *,
    ended_too: bool = False,
) -> Credential:
    """Who asks, as `check_headers` has it, if the body is the one that was signed; `Refused` with 401 otherwise.

    A request may be repeated by whoever recorded it, so what it asks for must be safe to repeat.
    """
    credential, digest = check_headers(headers, key_server, federation, method, path, ended_too=ended_too)
    if hashlib.sha256(body).digest() != digest:
        raise Refused(401, "unauthenticated", "the request cannot be believed: its body is not the one that was signed")
    return credential


def _request_payload(method: str, path: str, digest: bytes) -> bytes:
    return bind(method.upper(), path, digest)
