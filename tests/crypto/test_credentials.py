"""A credential is believed when the key server signed it as it is."""

from __future__ import annotations

import base64
import json

import pytest

from ntkfl.crypto.context import bind
from ntkfl.crypto.hpke import SealingKey, SigningKey
from ntkfl.crypto.signed import Credential
from ntkfl.errors import TrustError

SERVER, CLIENT, SEALING = SigningKey.generate(), SigningKey.generate(), SealingKey.generate()


def credential(**changes: object) -> Credential:
    values = {"federation": "f", "client": "c"}
    keys = {"sealing_key": SEALING.public.hex(), "signing_key": CLIENT.public.hex()}
    return Credential(**(values | keys | changes))  # type: ignore[arg-type]


ISSUED = credential().issue(SERVER)


def signed(payload: bytes, federation: str = "f") -> str:
    """Any payload, with the key server's true signature."""
    return base64.b64encode(SERVER.sign(payload, bind("ntkfl credential v3", federation)) + payload).decode()


def test_a_credential_comes_back_as_it_was_issued() -> None:
    assert Credential.check(ISSUED, SERVER.public, "f") == credential()


def test_a_credential_with_any_bit_changed_is_refused() -> None:
    raw = base64.b64decode(ISSUED)
    for position in range(len(raw)):
        changed = bytearray(raw)
        changed[position] ^= 1
        with pytest.raises(TrustError):
            Credential.check(base64.b64encode(changed).decode(), SERVER.public, "f")


def test_a_credential_of_another_key_server_or_federation_is_refused() -> None:
    with pytest.raises(TrustError):
        Credential.check(ISSUED, SigningKey.generate().public, "f")
    with pytest.raises(TrustError):
        Credential.check(ISSUED, SERVER.public, "g")


def test_even_a_true_signature_makes_no_credential_of_the_wrong_kind() -> None:
    good = json.loads(credential().payload())
    spaced = json.dumps(good).encode()
    twice = credential().payload()[:-1] + b',"client":"d"}'
    for payload in (spaced, twice, json.dumps(good | {"more": 1}).encode(), b"[]", b"5", b"\xff"):
        with pytest.raises(TrustError):
            Credential.check(signed(payload), SERVER.public, "f")
    with pytest.raises(TrustError, match="another federation"):
        Credential.check(signed(credential(federation="g").payload()), SERVER.public, "f")
