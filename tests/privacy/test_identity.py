"""A credential is believed when the key server signed it as it is; a request, when its holder signed it."""

from __future__ import annotations

import base64
import json

import pytest

from ntkfl.errors import Refused, TrustError
from ntkfl.privacy.identity import (
    CREDENTIAL_HEADER,
    SIGNATURE_HEADER,
    Credential,
    check_request,
    sign_request,
)
from ntkfl.privacy.sealing import SealingKey, SigningKey, bind

SERVER, CLIENT, SEALING = SigningKey.generate(), SigningKey.generate(), SealingKey.generate()
ASK = ("POST", "/v1/runs/a/seed?x=1", b"body")


def credential(**changes: str) -> Credential:
    values = {"federation": "f", "client": "c", "role": "client"}
    keys = {"sealing_key": SEALING.public.hex(), "signing_key": CLIENT.public.hex()}
    return Credential(**(values | keys | changes))


ISSUED = credential().issue(SERVER)


def signed(payload: bytes, federation: str = "f") -> str:
    """Any payload, with the key server's true signature."""
    return base64.b64encode(SERVER.sign(payload, bind("ntkfl credential v1", federation)) + payload).decode()


def test_a_credential_comes_back_as_it_was_issued() -> None:
    assert Credential.check(ISSUED, SERVER.public, "f") == credential()


def test_a_credential_with_any_bit_changed_is_refused() -> None:
    raw = base64.b64decode(ISSUED)
    for position in range(len(raw)):
        changed = bytearray(raw)
        changed[position] ^= 1
        with pytest.raises(TrustError):
            Credential.check(base64.b64encode(changed).decode(), SERVER.public, "f")


def test_a_credential_with_another_name_under_the_same_signature_is_refused() -> None:
    forged = base64.b64decode(ISSUED)[:64] + credential(client="d").payload()
    with pytest.raises(TrustError, match="signature does not hold"):
        Credential.check(base64.b64encode(forged).decode(), SERVER.public, "f")


@pytest.mark.parametrize("issued", ["", "not base64!", "AAAA", base64.b64encode(bytes(64) + b"[" * 9999).decode()])
def test_what_is_no_credential_is_refused(issued: str) -> None:
    with pytest.raises(TrustError, match="not a credential"):
        Credential.check(issued, SERVER.public, "f")


def test_a_credential_of_another_key_server_or_federation_is_refused() -> None:
    with pytest.raises(TrustError):
        Credential.check(ISSUED, SigningKey.generate().public, "f")
    with pytest.raises(TrustError):
        Credential.check(ISSUED, SERVER.public, "g")


def test_even_a_true_signature_makes_no_credential_of_the_wrong_kind() -> None:
    good = json.loads(credential().payload())
    spaced = json.dumps(good).encode()
    twice = credential().payload()[:-1] + b',"role":"evaluator"}'
    for payload in (spaced, twice, json.dumps(good | {"more": 1}).encode(), b"[]", b"5", b"\xff"):
        with pytest.raises(TrustError):
            Credential.check(signed(payload), SERVER.public, "f")
    for changes in ({"role": "operator"}, {"federation": "g"}):
        with pytest.raises(TrustError, match="another federation or role"):
            Credential.check(signed(credential(**changes).payload()), SERVER.public, "f")


def test_a_signed_request_tells_who_asks() -> None:
    headers = sign_request(ISSUED, CLIENT, *ASK)
    assert check_request(headers, SERVER.public, "f", *ASK) == credential()


@pytest.mark.parametrize(
    "asked",
    [
        ("GET", *ASK[1:]),
        (ASK[0], "/v1/runs/b/seed?x=1", ASK[2]),
        (ASK[0], "/v1/runs/a/seed?x=2", ASK[2]),
        (ASK[0], "/v1/runs/a/seed", ASK[2]),
        (*ASK[:2], b"bodz"),
        (*ASK[:2], b""),
    ],
)
def test_a_signature_is_for_one_method_path_and_body(asked: tuple[str, str, bytes]) -> None:
    with pytest.raises(Refused) as refused:
        check_request(sign_request(ISSUED, CLIENT, *ASK), SERVER.public, "f", *asked)
    assert (refused.value.status, refused.value.reason) == (401, "unauthenticated")


def test_another_s_credential_is_of_no_use() -> None:
    with pytest.raises(Refused, match="cannot be believed"):
        check_request(sign_request(ISSUED, SigningKey.generate(), *ASK), SERVER.public, "f", *ASK)


@pytest.mark.parametrize("missing", [CREDENTIAL_HEADER, SIGNATURE_HEADER])
def test_an_unsigned_request_is_told_what_it_lacks(missing: str) -> None:
    headers = sign_request(ISSUED, CLIENT, *ASK)
    del headers[missing]
    with pytest.raises(Refused) as refused:
        check_request(headers, SERVER.public, "f", *ASK)
    assert (refused.value.status, refused.value.reason) == (401, "unsigned")


@pytest.mark.parametrize("signature", ["", "?", "AAAA", "\N{GREEK SMALL LETTER RHO}"])
def test_a_signature_that_is_none_is_refused(signature: str) -> None:
    headers = sign_request(ISSUED, CLIENT, *ASK) | {SIGNATURE_HEADER: signature}
    with pytest.raises(Refused, match="cannot be believed"):
        check_request(headers, SERVER.public, "f", *ASK)
