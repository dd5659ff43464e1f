"""Signed requests: three headers prove who asks, before a byte of the body is read.

A client shows its credential, the aggregator the word "aggregator": its key stands in `federation.toml`. Whoever
recorded a request can repeat it, so what a request asks for must be safe to repeat.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping

from ntkfl.crypto.context import bind
from ntkfl.crypto.credentials import Credential
from ntkfl.crypto.hpke import SigningKey, parse_key, verify
from ntkfl.errors import NTKFLError, Refused
from ntkfl.services.peers import Peers

AGGREGATOR = "aggregator"  # in the place of a credential
CREDENTIAL_HEADER, DIGEST_HEADER, SIGNATURE_HEADER = "ntkfl-credential", "ntkfl-digest", "ntkfl-signature"
_REQUEST = "ntkfl request v2"


def sign_request(issued: str, key: SigningKey, method: str, path: str, body: bytes) -> dict[str, str]:
    """The headers: the credential, the body's SHA-256, and a signature over both, method and path (with query)."""
    digest = hashlib.sha256(body).digest()
    signature = key.sign(bind(issued, method.upper(), path, digest), bind(_REQUEST))
    return {
        CREDENTIAL_HEADER: issued,
        DIGEST_HEADER: digest.hex(),
        SIGNATURE_HEADER: base64.b64encode(signature).decode(),
    }


def check_headers(headers: Mapping[str, str], peers: Peers, method: str, path: str) -> tuple[Credential | None, bytes]:
    """The caller's credential (None: the aggregator) and the SHA-256 that the body must have.

    `Refused` if the signature does not hold. Names of `headers` are in lower case.
    """
    given = [headers.get(name) for name in (CREDENTIAL_HEADER, DIGEST_HEADER, SIGNATURE_HEADER)]
    if None in given:
        raise Refused("unsigned", f"the request lacks {CREDENTIAL_HEADER}, {DIGEST_HEADER} or {SIGNATURE_HEADER}")
    issued, digest, signature = map(str, given)
    try:
        credential, key = None, peers.key_of("aggregator")
        if issued != AGGREGATOR:
            credential = Credential.check(issued, peers.key_of("key_server"), peers.federation)
            key = bytes.fromhex(credential.signing_key)
        expected = parse_key(digest, DIGEST_HEADER)
        signed = bind(issued, method.upper(), path, expected)
        verify(key, base64.b64decode(signature, validate=True), signed, bind(_REQUEST))
    except (NTKFLError, ValueError) as error:
        raise Refused("unauthenticated", f"the request cannot be believed: {error}") from None
    return credential, expected
