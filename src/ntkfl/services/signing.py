"""Signed requests: one header proves who asks, before a byte of the body is read.

    authorization: NTKFL credential SHA-256-of-the-body signature

A client shows its credential, the aggregator the word "aggregator": its key stands in `federation.toml`. The signature
is over all of what is asked: credential, method, path with query, and digest. Whoever recorded a request can repeat it,
so what a request asks for must be safe to repeat.
"""

from __future__ import annotations

import base64
import hashlib

from ntkfl.crypto.context import bind
from ntkfl.crypto.credentials import Credential
from ntkfl.crypto.hpke import SigningKey, parse_key, verify
from ntkfl.errors import NTKFLError, Refused
from ntkfl.services.peers import Peers

AGGREGATOR = "aggregator"  # in the place of a credential
_SCHEME, _REQUEST = "NTKFL", bind("ntkfl request v2")


def sign_request(issued: str, key: SigningKey, method: str, path: str, body: bytes) -> str:
    """The value of the header, for the holder of the credential `issued` and of its signing key."""
    digest = hashlib.sha256(body).digest()
    signature = key.sign(bind(issued, method.upper(), path, digest), _REQUEST)
    return f"{_SCHEME} {issued} {digest.hex()} {base64.b64encode(signature).decode()}"


def check_request(header: str, peers: Peers, method: str, path: str) -> tuple[Credential | None, bytes]:
    """The caller's credential (None: the aggregator) and the SHA-256 that the body must have; `Refused` if the
    signature does not hold.
    """
    try:
        _, issued, digest, signature = header.split(" ")
        credential, key = None, peers.key_of("aggregator")
        if issued != AGGREGATOR:
            credential = Credential.check(issued, peers.key_of("key_server"), peers.federation)
            key = bytes.fromhex(credential.signing_key)
        expected = parse_key(digest, "the body's digest")
        verify(key, base64.b64decode(signature, validate=True), bind(issued, method.upper(), path, expected), _REQUEST)
    except (NTKFLError, ValueError) as error:
        raise Refused("unauthenticated", f"the request is not signed as it must be: {error}") from None
    return credential, expected
