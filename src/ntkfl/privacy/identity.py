"""Who somebody is: a credential the key server signed, and requests its holder signs.

The key server vouches for a client's two public keys in a `Credential`. Whoever pins the key server's signing key can
check it without asking anybody; the holder proves to be its owner by signing each request.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from ntkfl.errors import NTKFLError, Refused, TrustError
from ntkfl.privacy.sealing import SigningKey, bind, parse_key, verify

ROLES = ("client", "evaluator")
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"  # of a federation, a run or a client
_CREDENTIAL, _REQUEST = "ntkfl credential v1", "ntkfl request v1"
CREDENTIAL_HEADER, SIGNATURE_HEADER = "ntkfl-credential", "ntkfl-signature"


@dataclass(frozen=True)
class Credential:
    """The key server's word for a client. Keys are hexadecimal."""

    federation: str
    client: str
    role: str
    sealing_key: str
    signing_key: str

    def payload(self) -> bytes:
        """What is signed: JSON with sorted keys and no spaces."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    def issue(self, key: SigningKey) -> str:
        """The credential as it travels: base64 of the signature (64 bytes) and the payload."""
        signature = key.sign(self.payload(), bind(_CREDENTIAL, self.federation))
        return base64.b64encode(signature + self.payload()).decode()

    @classmethod
    def check(cls, issued: str, key_server: bytes, federation: str) -> Self:
        """The credential, if the key server of this federation signed it; `TrustError` otherwise."""
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
        return credential


def sign_request(issued: str, key: SigningKey, method: str, path: str, body: bytes) -> dict[str, str]:
    """Headers that prove who asks: the credential, and a signature over method, path and body."""
    signature = key.sign(_request_payload(method, path, body), bind(_REQUEST))
    return {CREDENTIAL_HEADER: issued, SIGNATURE_HEADER: base64.b64encode(signature).decode()}


def check_request(
    headers: Mapping[str, str], key_server: bytes, federation: str, method: str, path: str, body: bytes
) -> Credential:
    """Who asks; `Refused` with 401 if that cannot be believed. `path` includes the query; `headers` are in lower case.

    A request may be repeated by whoever recorded it, so what it asks for must be safe to repeat.
    """
    issued, signature = headers.get(CREDENTIAL_HEADER), headers.get(SIGNATURE_HEADER)
    if issued is None or signature is None:
        raise Refused(401, "unsigned", f"the request lacks {CREDENTIAL_HEADER} or {SIGNATURE_HEADER}")
    try:
        credential = Credential.check(issued, key_server, federation)
        raw = base64.b64decode(signature, validate=True)
        verify(bytes.fromhex(credential.signing_key), raw, _request_payload(method, path, body), bind(_REQUEST))
    except (NTKFLError, ValueError) as error:
        raise Refused(401, "unauthenticated", f"the request cannot be believed: {error}") from None
    return credential


def _request_payload(method: str, path: str, body: bytes) -> bytes:
    return bind(method.upper(), path, hashlib.sha256(body).digest())
