"""What the roles sign for one another: credentials, requests, receipts, and the secret ρ of a run.

- A **credential** is the key server's statement of a client's name and two public keys. Who knows the key server's
  signing key checks it without asking. It ends when the key server revokes the client.
- A **request** carries one header that proves who asks, before a byte of the body is read:
  `authorization: NTKFL credential SHA-256-of-the-body signature`. The aggregator shows the word "aggregator" in place
  of a credential. A recorded request can be repeated, so what it asks for must be safe to repeat.
- A **receipt** is the shuffler's signature that it holds a client's rows for one announcement. It says nothing of the
  rows: no count, no time, no hash, not even the client. All receipts of an exchange are the same bytes.
- **ρ** travels sealed to one client and signed: a proxy that ends TLS before the key server can neither read it nor
  put another in its place.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from ntkfl.crypto.context import Secret, bind
from ntkfl.crypto.hpke import KEY_BYTES, SealingKey, SigningKey, parse_key, seal, verify
from ntkfl.crypto.row_frames import Announced
from ntkfl.errors import NTKFLError, Refused, TrustError

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"  # of a federation, a run or a client
SIGNATURE_BYTES = 64
AGGREGATOR = "aggregator"  # in the place of a credential
_CREDENTIAL, _RECEIPT, _RUN_SECRET = "ntkfl credential v3", "ntkfl receipt v2", "ntkfl seed v1"
_SCHEME, _REQUEST = "NTKFL", bind("ntkfl request v2")


def check_name(name: str) -> None:
    """`Refused` unless this can be the name of a run or a client: it also names files."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise Refused("malformed", f"a name has up to 64 letters, digits, '.', '_' or '-', got {name[:80]!r}")


@dataclass(frozen=True)
class Credential:
    """A client's name and public keys (64 hexadecimal digits each)."""

    federation: str
    client: str
    sealing_key: str
    signing_key: str

    def payload(self) -> bytes:
        """What is signed: JSON with sorted keys and no spaces."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    def issue(self, key: SigningKey) -> str:
        """The credential as it travels: base64 of the signature and the payload."""
        signature = key.sign(self.payload(), bind(_CREDENTIAL, self.federation))
        return base64.b64encode(signature + self.payload()).decode()

    @classmethod
    def check(cls, issued: str, key_server: bytes, federation: str) -> Self:
        """The credential, if the key server of this federation signed it; `TrustError` otherwise."""
        try:
            raw = base64.b64decode(issued, validate=True)
            signature, payload = raw[:SIGNATURE_BYTES], raw[SIGNATURE_BYTES:]
            values: Any = json.loads(payload)
            credential = cls(**values)
        except (ValueError, TypeError, RecursionError):
            raise TrustError("not a credential") from None
        verify(key_server, signature, payload, bind(_CREDENTIAL, federation))
        if credential.federation != federation or credential.payload() != payload:
            raise TrustError("a credential of another federation")
        parse_key(credential.sealing_key, "the credential's sealing key")
        parse_key(credential.signing_key, "the credential's signing key")
        return credential


def sign_request(issued: str, key: SigningKey, method: str, path: str, body: bytes) -> str:
    """The header's value, for the holder of the credential `issued`: signed are credential, method, path with query,
    and the body's SHA-256.
    """
    digest = hashlib.sha256(body).digest()
    signature = key.sign(bind(issued, method.upper(), path, digest), _REQUEST)
    return f"{_SCHEME} {issued} {digest.hex()} {base64.b64encode(signature).decode()}"


def check_request(
    header: str, key_server: bytes, aggregator: bytes, federation: str, method: str, path: str
) -> tuple[Credential | None, bytes]:
    """The caller's credential (None: the aggregator) and the SHA-256 that the body must have.

    `Refused` where the signature does not hold. `key_server` and `aggregator` are public signing keys.
    """
    try:
        _, issued, digest, signature = header.split(" ")
        credential, key = None, aggregator
        if issued != AGGREGATOR:
            credential = Credential.check(issued, key_server, federation)
            key = bytes.fromhex(credential.signing_key)
        expected = parse_key(digest, "the body's digest")
        verify(key, base64.b64decode(signature, validate=True), bind(issued, method.upper(), path, expected), _REQUEST)
    except (NTKFLError, ValueError) as error:
        raise Refused("unauthenticated", f"the request is not signed as it must be: {error}") from None
    return credential, expected


def issue_receipt(signer: SigningKey, federation: str, run: str, announced: Announced) -> bytes:
    """64 bytes, the same for all clients that answered this announcement."""
    return signer.sign(_receipt(announced), bind(_RECEIPT, federation, run))


def check_receipt(receipt: bytes, shuffler: bytes, federation: str, run: str, announced: Announced) -> None:
    """`TrustError` unless the shuffler issued it for this announcement."""
    verify(shuffler, receipt, _receipt(announced), bind(_RECEIPT, federation, run))


def _receipt(announced: Announced) -> bytes:
    """What a receipt is over: nothing that differs between clients."""
    key, digest = announced
    return bind(_RECEIPT, *key, digest)


def seal_run_secret(
    secret: Secret, sealing_public: bytes, key: SigningKey, federation: str, run: str, client: str
) -> dict[str, str]:
    """ρ as the key server sends it to a client: sealed to the client's key, the sealed bytes signed."""
    sealed = seal(sealing_public, secret.reveal(), bind(_RUN_SECRET, federation, run, client))
    signature = key.sign(sealed, bind(_RUN_SECRET, federation, run, client, sealing_public))
    return {"sealed": base64.b64encode(sealed).decode(), "signature": base64.b64encode(signature).decode()}


def open_run_secret(
    answer: object, sealing_key: SealingKey, key_server: bytes, federation: str, run: str, client: str
) -> Secret:
    """ρ, if the key server signed it for this federation, run and client; `TrustError` otherwise."""
    try:
        if not isinstance(answer, Mapping):
            raise TypeError
        sealed, signature = (base64.b64decode(answer[name], validate=True) for name in ("sealed", "signature"))
    except (KeyError, TypeError, ValueError):
        raise TrustError("the key server's answer holds no ρ that can be read") from None
    verify(key_server, signature, sealed, bind(_RUN_SECRET, federation, run, client, sealing_key.public))
    secret = sealing_key.open(sealed, bind(_RUN_SECRET, federation, run, client))
    if len(secret) != KEY_BYTES:
        raise TrustError(f"the key server's ρ must have {KEY_BYTES} bytes")
    return Secret(secret)
