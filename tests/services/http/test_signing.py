"""A request is believed when the holder of a credential signed it: its method, path, query and body."""

from __future__ import annotations

import hashlib

import pytest

from ntkfl.crypto import credentials
from ntkfl.crypto.credentials import Credential
from ntkfl.crypto.hpke import SealingKey, SigningKey
from ntkfl.services.http.refusals import refusal_response
from ntkfl.services.http.signing import (
    CREDENTIAL_HEADER,
    DIGEST_HEADER,
    SIGNATURE_HEADER,
    Unauthenticated,
    check_headers,
    check_request,
    sign_request,
)

SERVER, CLIENT, SEALING = SigningKey.generate(), SigningKey.generate(), SealingKey.generate()
ASK = ("POST", "/v1/runs/a/seed?x=1", b"body")


def credential(issued: int = 1000, ends: int = 1 << 40) -> Credential:
    return Credential("f", "c", "client", SEALING.public.hex(), CLIENT.public.hex(), issued, ends)


ISSUED = credential().issue(SERVER)


def test_a_signed_request_gives_the_client_s_credential() -> None:
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
    with pytest.raises(Unauthenticated) as refused:
        check_request(sign_request(ISSUED, CLIENT, *ASK), SERVER.public, "f", *asked)
    assert refused.value.reason == "unauthenticated"


@pytest.mark.parametrize("missing", [CREDENTIAL_HEADER, DIGEST_HEADER, SIGNATURE_HEADER])
def test_an_unsigned_request_is_refused_with_what_it_lacks(missing: str) -> None:
    headers = sign_request(ISSUED, CLIENT, *ASK)
    del headers[missing]
    with pytest.raises(Unauthenticated) as refused:
        check_request(headers, SERVER.public, "f", *ASK)
    assert refused.value.reason == "unsigned"


def test_the_client_is_known_before_the_body_is_there() -> None:
    headers = sign_request(ISSUED, CLIENT, *ASK)
    asked, digest = check_headers(headers, SERVER.public, "f", *ASK[:2])
    assert (asked, digest) == (credential(), hashlib.sha256(ASK[2]).digest())


@pytest.mark.parametrize("digest", ["", "00", "zz" * 32, hashlib.sha256(b"bodz").hexdigest()])
def test_another_digest_than_the_one_that_was_signed_is_refused(digest: str) -> None:
    headers = sign_request(ISSUED, CLIENT, *ASK) | {DIGEST_HEADER: digest}
    with pytest.raises(Unauthenticated, match="cannot be believed"):
        check_headers(headers, SERVER.public, "f", *ASK[:2])


def test_a_request_is_good_until_its_credential_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = sign_request(credential(ends=4000).issue(SERVER), CLIENT, *ASK)
    for now, good in ((0.0, True), (3999.9, True), (4000.0, False), (1e12, False)):
        monkeypatch.setattr(credentials.time, "time", lambda now=now: now)
        if good:
            assert check_request(headers, SERVER.public, "f", *ASK) == credential(ends=4000)
            continue
        with pytest.raises(Unauthenticated) as refused:
            check_request(headers, SERVER.public, "f", *ASK)
        assert refused.value.reason == "ended"
        assert refusal_response(refused.value).status_code == 401
        assert check_request(headers, SERVER.public, "f", *ASK, allow_expired=True).ends == 4000
