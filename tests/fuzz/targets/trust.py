"""`privacy/` and what the roles sign and seal for one another."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ntkfl.crypto.context import Secret, bind
from ntkfl.crypto.credentials import Credential
from ntkfl.crypto.hpke import SealingKey, SigningKey
from ntkfl.crypto.receipt import check_receipt, issue_receipt
from ntkfl.crypto.row_frames import Announced, BatchKey, open_row, pack_rows, seal_rows, unpack_rows
from ntkfl.services.announcement import Announcement
from ntkfl.services.http.signing import check_request, sign_request
from ntkfl.services.key_server.key_protocol import check_revoked, open_run_secret, seal_run_secret, sign_revoked
from ntkfl.services.shuffler.batch import Batch
from ntkfl.wire import Message
from tests.fuzz.target import Target, unforgeable
from tests.fuzz.targets.twists import sealed_again, twisted_json

NAMES = ("federation-0", "run-0")
KEY = BatchKey(3, 0)
SAID = Announced(KEY, bytes(range(32)))
SIGNER = SigningKey(Ed25519PrivateKey.from_private_bytes(b"s" * 32))  # fixed, so that an input can be tried again
OPENER = SealingKey(X25519PrivateKey.from_private_bytes(b"o" * 32))
_WORDS = (b'"kind":"end"', b'"batch":null', b"evaluate", b"exchange", b'"seconds":', b"-1", b"\\ud800", b"null", b'"')


def targets(scratch: Path) -> list[Target]:
    largest = Announced(BatchKey(2**32 - 1, 255), b"\xff" * 32)
    frames = pack_rows(SAID, [b"abcd", b"efgh"]), pack_rows(largest, [bytes(90)])
    sealed = tuple(seal_rows([b"", b"row", bytes(200)], OPENER.public, *NAMES, SAID))
    receipt = issue_receipt(SIGNER, *NAMES, SAID)
    return [
        unforgeable("rows damaged", frames, unpack_rows),
        Target("rows forged", frames, _rows, sealed_again),
        unforgeable("sealed row", sealed, lambda data: open_row(OPENER, data, *NAMES, SAID)),
        unforgeable("receipt", (receipt,), lambda data: check_receipt(data, SIGNER.public, *NAMES, SAID)),
        *_announcements(),
        *_credentials(),
        *_answers(),
        *_keys(scratch),
    ]


def _rows(data: bytes) -> None:
    said, rows = unpack_rows(data)
    assert pack_rows(said, rows) == data
    assert BatchKey.of(said.key.number) == said.key


def _announcements() -> list[Target]:
    batch = Batch(KEY, ("a", "b", "c"), 10, 120, 2, 30.0)
    weights = Message("weights", 3, {"weights": torch.randn(4)})
    signed = tuple(
        said.sign(SIGNER, *NAMES)
        for said in (
            Announcement("exchange", KEY, batch, weights, OPENER.public),
            Announcement("evaluate", BatchKey(3, 255), None, weights, OPENER.public),
            Announcement("end", BatchKey(4, 0)),
        )
    )

    def sign_again(data: bytes) -> bytes:
        return SIGNER.sign(data[64:], bind("ntkfl announcement v2", *NAMES)) + data[64:]

    def read(data: bytes) -> Announcement:
        return Announcement.check(data, SIGNER.public, *NAMES)

    def check(data: bytes) -> None:
        said = read(data)
        said.key.check()
        if said.batch is not None:
            said.batch.check().cohort_digest(b"salt")
        assert said.announced == Announced.of(said.key, data)
        again = read(said.sign(SIGNER, *NAMES))
        assert (again.key, again.batch, again.sealing_key) == (said.key, said.batch, said.sealing_key)

    return [
        unforgeable("announcement unsigned", signed, read),
        Target("announcement signed", signed, check, sign_again, words=_WORDS),
    ]


def _credentials() -> list[Target]:
    credential = Credential(NAMES[0], "client-0", "client", OPENER.public.hex(), SIGNER.public.hex(), 0, 1 << 40)
    issued = credential.issue(SIGNER)
    path = "/v1/runs/run-0/rows"
    request = json.dumps(sign_request(issued, SIGNER, "POST", path, b"body")).encode()

    def read(data: bytes) -> object:
        return Credential.check(data.decode("latin-1"), SIGNER.public, NAMES[0])

    def sign_again(data: bytes) -> bytes:
        try:
            payload = base64.b64decode(data)[64:]
        except ValueError:
            return data
        return base64.b64encode(SIGNER.sign(payload, bind("ntkfl credential v2", NAMES[0])) + payload)

    def payload(data: bytes) -> object:
        """The payload itself is changed, and then signed."""
        signature = SIGNER.sign(data, bind("ntkfl credential v2", NAMES[0]))
        found = Credential.check(base64.b64encode(signature + data).decode(), SIGNER.public, NAMES[0])
        assert found.payload() == data
        return found

    def asked(data: bytes) -> None:
        try:
            headers = {str(k).lower(): str(v) for k, v in json.loads(data).items()}
        except (ValueError, AttributeError, RecursionError):
            names = ("ntkfl-credential", "ntkfl-digest", "ntkfl-signature")
            headers = dict.fromkeys(names, data.decode("latin-1"))
        assert check_request(headers, SIGNER.public, NAMES[0], "POST", path, b"body") == credential

    return [
        Target("credential", (issued.encode(),), read, sign_again),
        Target("credential payload", (credential.payload(),), payload, None, twisted_json, _WORDS),
        Target("signed request", (request,), asked),
    ]


def _answers() -> list[Target]:
    """The key server's answers, as those who ask it read them."""
    seed = json.dumps(seal_run_secret(Secret(bytes(32)), OPENER.public, SIGNER, *NAMES, "client-0")).encode()
    revoked = json.dumps(sign_revoked(3, ["a", "b"], SIGNER, NAMES[0])).encode()

    def values(data: bytes) -> object:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            return {"serial": data.decode("latin-1"), "signature": data.hex()}

    def opened(data: bytes) -> None:
        secret = open_run_secret(values(data), OPENER, SIGNER.public, *NAMES, "client-0")  # type: ignore[arg-type]
        assert secret.reveal() == bytes(32)

    def listed(data: bytes) -> None:
        assert check_revoked(values(data), SIGNER.public, NAMES[0]) == (3, frozenset("ab"))  # type: ignore[arg-type]

    return [
        Target("sealed seed", (seed,), opened, twist=twisted_json),
        Target("revoked clients", (revoked,), listed, twist=twisted_json),
    ]


def _keys(scratch: Path) -> list[Target]:
    signing, sealing, tried = scratch / "signing.pem", scratch / "sealing.pem", scratch / "tried.pem"
    SIGNER.save(signing)
    OPENER.save(sealing)

    tried.touch(mode=0o600)  # one that others can read is refused before it is looked at

    def load(data: bytes) -> None:
        tried.write_bytes(data)
        try:
            SigningKey.load(tried).sign(b"", b"")
        except Exception:
            SealingKey.load(tried)

    return [Target("private key", (signing.read_bytes(), sealing.read_bytes()), load, share=0.5)]
