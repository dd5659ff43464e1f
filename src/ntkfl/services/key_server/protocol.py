"""What the key server and its clients say to each other: enrolments, and the secret ρ of a run.

ρ is sealed to the client's key for `bind("ntkfl seed v1", federation, run, client)`, and signed by the key server over
the sealed bytes, for `bind("ntkfl seed v1", federation, run, client, sealing key)`: a proxy that ends TLS before the
key server neither reads it nor puts another in its place.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

from ntkfl.crypto.context import Secret, bind
from ntkfl.crypto.hpke import KEY_BYTES, SealingKey, SigningKey, seal, verify
from ntkfl.errors import TrustError

_RUN_SECRET = "ntkfl seed v1"


def token_client(token: str) -> str:
    """The client that a token is for: it begins with its name."""
    return token.strip().rpartition(".")[0]


def enrolment(token: str, sealing_key: SealingKey, signing_key: SigningKey) -> dict[str, str]:
    """The body of `POST /v1/enrol`. A key that is not its own gains a client nothing: every request names its
    credential in what it signs, and ρ is sealed.
    """
    return {
        "token": token.strip(),
        "client": token_client(token),
        "sealing_key": sealing_key.public.hex(),
        "signing_key": signing_key.public.hex(),
    }


def seal_run_secret(
    secret: Secret, sealing_public: bytes, key: SigningKey, federation: str, run: str, client: str
) -> dict[str, str]:
    """The key server's answer to `POST /v1/runs/{run}/secret`."""
    context = bind(_RUN_SECRET, federation, run, client)
    sealed = seal(sealing_public, secret.reveal(), context)
    signature = key.sign(sealed, bind(_RUN_SECRET, federation, run, client, sealing_public))
    return {"sealed": base64.b64encode(sealed).decode(), "signature": base64.b64encode(signature).decode()}


def open_run_secret(
    answer: Mapping[str, object],
    sealing_key: SealingKey,
    key_server_public: bytes,
    federation: str,
    run: str,
    client: str,
) -> Secret:
    """ρ, if the key server signed it for this federation, run and client; `TrustError` otherwise."""
    sealed, signature = _bytes(answer, "sealed"), _bytes(answer, "signature")
    verify(key_server_public, signature, sealed, bind(_RUN_SECRET, federation, run, client, sealing_key.public))
    secret = sealing_key.open(sealed, bind(_RUN_SECRET, federation, run, client))
    if len(secret) != KEY_BYTES:
        raise TrustError(f"the key server's ρ must have {KEY_BYTES} bytes")
    return Secret(secret)


def _bytes(answer: Mapping[str, object], field: str) -> bytes:
    value = answer.get(field) if isinstance(answer, Mapping) else None
    try:
        return base64.b64decode(value, validate=True)  # type: ignore[arg-type]  # whatever it is, it is refused
    except (TypeError, ValueError):
        raise TrustError(f"the key server's answer holds no {field!r}") from None
