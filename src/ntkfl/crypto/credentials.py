"""A client's credential: the key server vouches for its two public keys, for a time.

A role that trusts the key server's signing key can check a credential without asking it; the holder proves to be the
owner by signing each request (`services/http/signing.py`).
"""

from __future__ import annotations

import base64
import json
import time
from dataclasses import asdict, dataclass
from typing import Any, Self

from ntkfl.crypto.context import bind
from ntkfl.crypto.hpke import SigningKey, parse_key, verify
from ntkfl.errors import TrustError

ROLES = ("client", "evaluator")
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"  # of a federation, a run or a client
_CREDENTIAL = "ntkfl credential v2"
_LAST = 1 << 40  # seconds since 1970; later than that is no date


class Expired(TrustError):
    """A credential that was valid once."""


@dataclass(frozen=True)
class Credential:
    """The key server's statement of a client's name, role and keys, valid until `ends`.

    Keys are hexadecimal, times seconds since 1970.
    """

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
    def check(cls, issued: str, key_server: bytes, federation: str, *, allow_expired: bool = False) -> Self:
        """The credential, if the key server of this federation signed it and it has not ended (`Expired`, unless that
        is allowed); `TrustError` otherwise.
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
        if not allow_expired and time.time() >= credential.ends:
            raise Expired(f"the credential of {credential.client!r} ended at {as_date(credential.ends)}")
        return credential


def as_date(seconds: float) -> str:
    """A moment as people write it, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))
