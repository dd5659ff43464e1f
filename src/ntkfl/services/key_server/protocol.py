"""What the key server and its clients say to each other: enrolments, sealed secrets of runs, lists of revoked clients.

Signatures and seals are those of `crypto/hpke.py`; everything is bound to what it is for:

- proof of an enrolment: by the client's signing key, over its sealing key (32 bytes), for
  `bind("ntkfl enrolment v1", federation, client)`: no client enrols a key that is not its own;
- ρ, the secret of a run: sealed to the client's key for `bind("ntkfl seed v1", federation, run, client)`; signed by
  the key server, over the sealed bytes, for `bind("ntkfl seed v1", federation, run, client, sealing key)`;
- revoked clients: signed by the key server, over `bind("ntkfl revoked v1", *names in order)`, for
  `bind("ntkfl revoked v1", federation, serial)`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

from ntkfl.crypto.context import Secret, bind
from ntkfl.crypto.hpke import KEY_BYTES, SealingKey, SigningKey, seal, verify
from ntkfl.errors import TrustError

_ENROLMENT, _RUN_SECRET, _REVOKED = "ntkfl enrolment v1", "ntkfl seed v1", "ntkfl revoked v1"
_SMALL_ORDER = {  # Ed25519 keys, but for the sign bit, under which anybody can make signatures that hold
    bytes(32),
    bytes([1]) + bytes(31),
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
    *(bytes([low]) + b"\xff" * 30 + b"\x7f" for low in (0xEC, 0xED, 0xEE)),
}


def token_client(token: str) -> str:
    """The client that a token is for: it begins with its name."""
    return token.strip().rpartition(".")[0]


def enrolment(token: str, federation: str, sealing_key: SealingKey, signing_key: SigningKey) -> dict[str, str]:
    """The body of `POST /v1/enrol`."""
    client = token_client(token)
    return {
        "token": token.strip(),
        "client": client,
        "sealing_key": sealing_key.public.hex(),
        "signing_key": signing_key.public.hex(),
        "proof": signing_key.sign(sealing_key.public, bind(_ENROLMENT, federation, client)).hex(),
    }


def check_enrolment(federation: str, client: str, sealing_key: bytes, signing_key: bytes, proof: bytes) -> None:
    """`TrustError` unless the client holds the signing key, and the sealing key can be sealed to."""
    if signing_key[:31] + bytes([signing_key[31] & 0x7F]) in _SMALL_ORDER:
        raise TrustError("a signing key of small order is no proof of anything")
    verify(signing_key, proof, sealing_key, bind(_ENROLMENT, federation, client))
    seal(sealing_key, b"", bind(_ENROLMENT, federation, client))


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


def sign_revoked(serial: int, clients: Sequence[str], key: SigningKey, federation: str) -> dict[str, object]:
    """The key server's answer to `GET /v1/revoked`."""
    names = sorted(clients)
    signature = key.sign(bind(_REVOKED, *names), bind(_REVOKED, federation, serial))
    return {"serial": serial, "clients": names, "signature": base64.b64encode(signature).decode()}


def check_revoked(
    answer: Mapping[str, object], key_server_public: bytes, federation: str
) -> tuple[int, frozenset[str]]:
    """The serial number and the revoked clients; `TrustError` unless this federation's key server signed them.

    An older list is as well signed as a newer one: keep the one with the greatest serial number.
    """
    signature = _bytes(answer, "signature")  # which also says whether the answer is one at all
    serial, clients = answer.get("serial"), answer.get("clients")
    if type(serial) is not int or not 0 <= serial < 1 << 63 or not isinstance(clients, list):
        raise TrustError("not a list of revoked clients")
    if not all(isinstance(name, str) and name.isascii() for name in clients):
        raise TrustError("not a list of revoked clients")
    verify(key_server_public, signature, bind(_REVOKED, *clients), bind(_REVOKED, federation, serial))
    return serial, frozenset(clients)


def _bytes(answer: Mapping[str, object], field: str) -> bytes:
    value = answer.get(field) if isinstance(answer, Mapping) else None
    try:
        return base64.b64decode(value, validate=True)  # type: ignore[arg-type]  # whatever it is, it is refused
    except (TypeError, ValueError):
        raise TrustError(f"the key server's answer holds no {field!r}") from None
