"""A client's credential: the key server vouches for its two public keys.

A role that trusts the key server's signing key can check a credential without asking it. The holder proves to be the
owner by signing each request (`services/signing.py`). A credential ends when the key server revokes the client.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass
from typing import Any, Self

from ntkfl.crypto.context import bind
from ntkfl.crypto.hpke import SigningKey, parse_key, verify
from ntkfl.errors import TrustError

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"  # of a federation, a run or a client
_CREDENTIAL = "ntkfl credential v3"


@dataclass(frozen=True)
class Credential:
    """The key server's statement of a client's name and keys (hexadecimal)."""

    federation: str
    client: str
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
        if credential.federation != federation or credential.payload() != payload:
            raise TrustError("a credential of another federation")
        parse_key(credential.sealing_key, "the credential's sealing key")
        parse_key(credential.signing_key, "the credential's signing key")
        return credential
