"""Signatures hold for one key and one context alone; private keys stay private. Seals: `test_row_frames.py`, and that
they are those of RFC 9180 a second implementation shows, `test_decoder.py`.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import pickle
import stat
from pathlib import Path

import pytest

from ntkfl.atomic import write_private
from ntkfl.crypto.context import Secret, bind
from ntkfl.crypto.hpke import SealingKey, SigningKey, seal, verify
from ntkfl.crypto.signed import Credential
from ntkfl.errors import ConfigError, TrustError
from tests.crypto.test_row_frames import flipped

CONTEXT = bind("test", "federation", "run", 1)


SMALL_ORDER = ["00" * 32, "01" + "00" * 31, "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"]


@pytest.mark.parametrize("public", [*map(bytes.fromhex, SMALL_ORDER), b"", bytes(31), bytes(33)])
def test_nothing_is_sealed_to_what_is_no_key(public: bytes) -> None:
    with pytest.raises(TrustError, match="not an X25519 public key"):
        seal(public, b"rows", CONTEXT)


def test_a_signature_holds_for_its_writer_payload_and_context() -> None:
    key = SigningKey.generate()
    signature = key.sign(b"payload", CONTEXT)
    verify(key.public, signature, b"payload", CONTEXT)
    for wrong in (
        (SigningKey.generate().public, signature, b"payload", CONTEXT),
        (key.public, signature, b"payloae", CONTEXT),
        (key.public, signature, b"payload", CONTEXT + b"\0"),
        (key.public, signature, b"payload"[1:], CONTEXT + b"p"),
        (key.public, signature[:-1], b"payload", CONTEXT),
        (key.public, b"", b"payload", CONTEXT),
        (b"short", signature, b"payload", CONTEXT),
    ):
        with pytest.raises(TrustError, match="signature does not hold"):
            verify(*wrong)
    for changed in flipped(signature)[::7]:
        with pytest.raises(TrustError):
            verify(key.public, changed, b"payload", CONTEXT)


def test_a_secret_does_not_show() -> None:
    secret = Secret(os.urandom(32))
    value = secret.reveal()
    assert len(value) == 32
    assert value != Secret(os.urandom(32)).reveal()
    for shown in (repr(secret), str(secret), f"{secret}", f"{[secret]}"):
        assert "<secret>" in shown
        assert value.hex() not in shown
        assert repr(value) not in shown
    for leak in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not to be pickled"):
            leak(secret)


def test_a_key_file_is_private_from_its_first_moment_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    before = os.umask(0)  # even where nothing is masked
    try:
        key = SigningKey.generate()
        key.save(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SigningKey.load(path).public == key.public
    content = path.read_bytes()
    (tmp_path / "link.pem").symlink_to(tmp_path / "elsewhere")
    for taken in (path, tmp_path / "link.pem"):
        with pytest.raises(ConfigError, match="never overwritten"):
            key.save(taken)
    assert path.read_bytes() == content
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(ConfigError, match="cannot write"):
        key.save(tmp_path / "missing" / "key.pem")
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            SigningKey.load(path)


def test_what_is_no_key_of_the_kind_is_refused_in_one_line(tmp_path: Path) -> None:
    SigningKey.generate().save(tmp_path / "signing.pem")
    SealingKey.generate().save(tmp_path / "sealing.pem")
    with pytest.raises(TrustError, match="no X25519 key"):
        SealingKey.load(tmp_path / "signing.pem")
    with pytest.raises(TrustError, match="no Ed25519 key"):
        SigningKey.load(tmp_path / "sealing.pem")
    with pytest.raises(TrustError, match="no key at"):
        SigningKey.load(tmp_path / "absent.pem")
    # A key of this length, of an algorithm that nobody has ("/") and of another curve ("v") by its label: OpenSSL does
    # not say what is wrong with it.
    key = f"MC4CAQAwBQYDK2V{{}}BCIEI{'A' * 43}"
    pems = (f"-----BEGIN PRIVATE KEY-----\n{key.format(label)}\n-----END PRIVATE KEY-----\n".encode() for label in "/v")
    for name, content in zip(("noise", "unknown", "mixed"), (os.urandom(100), *pems), strict=True):
        write_private(tmp_path / name, content)
        with pytest.raises(TrustError, match="no private key that can be read"):
            SealingKey.load(tmp_path / name)


# -- Credentials: believed when the key server signed them as they are

SERVER, CLIENT, SEALING = SigningKey.generate(), SigningKey.generate(), SealingKey.generate()


def credential(**changes: object) -> Credential:
    values = {"federation": "f", "client": "c"}
    keys = {"sealing_key": SEALING.public.hex(), "signing_key": CLIENT.public.hex()}
    return Credential(**(values | keys | changes))  # type: ignore[arg-type]


ISSUED = credential().issue(SERVER)


def signed(payload: bytes, federation: str = "f") -> str:
    """Any payload, with the key server's true signature."""
    return base64.b64encode(SERVER.sign(payload, bind("ntkfl credential v3", federation)) + payload).decode()


def test_a_credential_comes_back_and_a_changed_or_anothers_is_refused() -> None:
    assert Credential.check(ISSUED, SERVER.public, "f") == credential()
    raw = base64.b64decode(ISSUED)
    changed = [base64.b64encode(one).decode() for one in flipped(raw)[::8]]
    others = [(ISSUED, SigningKey.generate().public, "f"), (ISSUED, SERVER.public, "g")]
    for wrong in (*((one, SERVER.public, "f") for one in changed), *others):
        with pytest.raises(TrustError):
            Credential.check(*wrong)


def test_even_a_true_signature_makes_no_credential_of_the_wrong_kind() -> None:
    good = json.loads(credential().payload())
    spaced = json.dumps(good).encode()
    twice = credential().payload()[:-1] + b',"client":"d"}'
    for payload in (spaced, twice, json.dumps(good | {"more": 1}).encode(), b"[]", b"5", b"\xff"):
        with pytest.raises(TrustError):
            Credential.check(signed(payload), SERVER.public, "f")
    with pytest.raises(TrustError, match="another federation"):
        Credential.check(signed(credential(federation="g").payload()), SERVER.public, "f")
