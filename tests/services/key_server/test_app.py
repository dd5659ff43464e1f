"""The key server as a process on loopback, spoken to over TLS as clients do."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from ntkfl.deployment.demo_setup import DemoSetup, init
from tests.deployment.federation import valid

from ntkfl.crypto.context import bind
from ntkfl.crypto.credentials import Credential
from ntkfl.crypto.hpke import SealingKey, SigningKey, seal
from ntkfl.errors import ConfigError, TrustError
from ntkfl.services.http.signing import CREDENTIAL_HEADER, sign_request
from ntkfl.services.key_server.key_protocol import check_revoked, open_run_secret
from ntkfl.services.key_server.store import KeyServer
from tests.services.fixtures import RUN, SEED_PATH, EnrollingClient, refused, start
from tests.services.processes import Process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo federation of many clients, so that every test has some of its own."""
    folder = tmp_path_factory.mktemp("federation")
    (folder / "run.toml").write_text(RUN)
    init(folder / "demo", folder / "run.toml", DemoSetup(clients=30))
    return folder / "demo"


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[Process]:
    with start(folder) as process:
        yield process


@pytest.fixture
def clients(process: Process, folder: Path, used: Iterator[int]) -> Iterator[EnrollingClient]:
    """Clients nobody has used yet."""
    return (EnrollingClient(folder / "clients" / f"client-{number}", process.urls["key-server"]) for number in used)


@pytest.fixture(scope="module")
def used() -> Iterator[int]:
    return iter(range(30))


def test_a_client_that_does_not_trust_the_authority_does_not_connect(process: Process) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(process.urls["key-server"] + "/health", trust_env=False)


def test_two_clients_get_the_same_seed_each_in_a_seal_of_its_own(clients: Iterator[EnrollingClient]) -> None:
    one, other = next(clients), next(clients)
    for client in (one, other):
        assert client.enrol().status_code == 200
        issued = Credential.check(client.credential, client.key_server, "demo")
        assert (issued.client, issued.role) == (client.name, "client")
        assert (issued.sealing_key, issued.signing_key) == (client.sealing.public.hex(), client.signing.public.hex())
    assert one.seed() == other.seed() == one.seed()
    assert len(one.seed()) == 32
    answer = one.ask().json()
    assert (answer["federation"], answer["run"], answer["client"]) == ("demo", "run-0", one.name)
    for wrong in (
        (other.sealing, one.key_server, "demo", "run-0", one.name),
        (one.sealing, other.signing.public, "demo", "run-0", one.name),
        (one.sealing, one.key_server, "demo2", "run-0", one.name),
        (one.sealing, one.key_server, "demo", "run-1", one.name),
        (one.sealing, one.key_server, "demo", "run-0", other.name),
    ):
        with pytest.raises(TrustError):
            open_run_secret(answer, *wrong)
    raw = base64.b64decode(answer["sealed"])
    with pytest.raises(TrustError, match="seal does not open"):  # whatever the signature says
        other.sealing.open(raw, bind("ntkfl seed v1", "demo", "run-0", one.name))


def test_a_seed_that_was_changed_or_comes_from_another_is_refused(clients: Iterator[EnrollingClient]) -> None:
    client = next(clients)
    client.enrol()
    answer = client.ask().json()
    names = (client.sealing, client.key_server, "demo", "run-0", client.name)
    sealed = bytearray(base64.b64decode(answer["sealed"]))
    sealed[40] ^= 1
    stranger = seal(client.sealing.public, bytes(32), bind("ntkfl seed v1", "demo", "run-0", client.name))
    for changes in (
        {"sealed": base64.b64encode(sealed).decode()},
        {"sealed": base64.b64encode(stranger).decode()},
        {"signature": base64.b64encode(bytes(64)).decode()},
        {"signature": None},
        {"sealed": 5},
        {"sealed": "ρ"},
    ):
        with pytest.raises(TrustError):
            open_run_secret(answer | changes, *names)
    with pytest.raises(TrustError):
        open_run_secret({}, *names)
    with pytest.raises(TrustError):
        open_run_secret(["no", "object"], *names)  # type: ignore[arg-type]


def test_a_token_is_for_one_client(clients: Iterator[EnrollingClient]) -> None:
    one, other = next(clients), next(clients)
    assert refused(one.enrol(token=one.name + "." + "A" * 43)) == (403, "bad-token")
    assert refused(one.enrol(token="")) == (422, "invalid")
    assert refused(one.enrol(token=other.token)) == (403, "bad-token")
    assert refused(one.enrol(client=other.name)) == (403, "bad-token")
    assert refused(one.enrol(client="nobody")) == (403, "bad-token")
    assert one.enrol().status_code == other.enrol().status_code == 200


def test_a_used_token_serves_its_own_keys_again_and_no_others(clients: Iterator[EnrollingClient]) -> None:
    client = next(clients)
    assert client.enrol().json() == client.enrol().json()
    kept = client.sealing, client.signing
    for client.sealing, client.signing in (
        (SealingKey.generate(), kept[1]),
        (kept[0], SigningKey.generate()),
        (SealingKey.generate(), SigningKey.generate()),
    ):
        assert refused(client.enrol()) == (409, "already-enrolled")
    client.sealing, client.signing = kept
    assert len(client.seed()) == 32


def test_keys_nobody_can_use_are_refused(clients: Iterator[EnrollingClient]) -> None:
    client, other = next(clients), SigningKey.generate()

    def enrol(sealing: bytes, signing: bytes, proof: bytes) -> tuple[int, str]:
        keys = {"sealing_key": sealing.hex(), "signing_key": signing.hex(), "proof": proof.hex()}
        return refused(client.enrol(**keys))

    context = bind("ntkfl enrolment v1", "demo", client.name)
    for small in (bytes(32), bytes([1]) + bytes(31)):  # sealed to which anybody could read
        assert enrol(small, client.signing.public, client.signing.sign(small, context)) == (422, "invalid-key")
    good = client.sealing.public
    nobody = bytes([1]) + bytes(31)  # under this Ed25519 key, this is everybody's signature of everything
    for key in (nobody, bytes([1]) + bytes(30) + bytes([0x80])):
        assert enrol(good, key, nobody + bytes(32)) == (422, "invalid-key")
    for proof in (bytes(64), other.sign(good, context), client.signing.sign(good, bind("other", "demo", client.name))):
        assert enrol(good, client.signing.public, proof) == (422, "invalid-key")
    for key in ("", "00" * 31, "zz" * 32, client.sealing.public.hex().upper() + " "):
        assert refused(client.enrol(sealing_key=key)) == (422, "invalid")
    assert client.enrol().status_code == 200


def test_only_the_holder_of_the_credential_s_key_gets_the_run_s_secret(clients: Iterator[EnrollingClient]) -> None:
    one, other = next(clients), next(clients)
    one.enrol()
    other.enrol()
    assert refused(one.call("POST", SEED_PATH)) == (401, "unsigned")
    assert refused(one.ask(credential=other.credential)) == (401, "unauthenticated")
    assert refused(one.ask(key=SigningKey.generate())) == (401, "unauthenticated")
    assert refused(one.ask(credential="x")) == (401, "unauthenticated")
    headers = sign_request(one.credential, one.signing, "POST", "/v1/runs/run-1/seed", b"")
    assert refused(one.call("POST", SEED_PATH, headers=headers)) == (401, "unauthenticated")
    headers = sign_request(one.credential, one.signing, "POST", SEED_PATH, b"")
    assert refused(one.call("POST", SEED_PATH, headers=headers, content=b"x")) == (401, "unauthenticated")
    assert refused(one.call("POST", SEED_PATH + "?a=b", headers=headers)) == (401, "unauthenticated")
    assert set(headers) >= {CREDENTIAL_HEADER}


def test_other_runs_and_federations_get_nothing(clients: Iterator[EnrollingClient], folder: Path) -> None:
    client = next(clients)
    client.enrol()
    assert refused(client.ask("/v1/runs/run-9/seed")) == (404, "unknown-run")
    key = SigningKey.load(folder / "key-server" / "signing-key.pem")
    names = (client.name, "client", client.sealing.public.hex(), client.signing.public.hex(), *valid())
    assert refused(client.ask(credential=Credential("other", *names).issue(key))) == (401, "unauthenticated")
    stranger = Credential("demo", *names).issue(SigningKey.generate())
    assert refused(client.ask(credential=stranger)) == (401, "unauthenticated")
    never = Credential("demo", "never-enrolled", *names[1:]).issue(key)
    assert refused(client.ask(credential=never)) == (403, "unknown-client")


def test_a_new_run_has_a_new_secret(clients: Iterator[EnrollingClient], folder: Path) -> None:
    client = next(clients)
    client.enrol()
    server = KeyServer.open(folder / "key-server")
    server.add_run("run-1")
    assert client.seed("/v1/runs/run-1/seed") != client.seed()
    with pytest.raises(ConfigError, match="one ρ for ever"):
        server.add_run("run-1")
    assert server.runs() == ["run-0", "run-1"]


def test_revocation_stops_service_and_is_published(clients: Iterator[EnrollingClient], folder: Path) -> None:
    enrolled, fresh = next(clients), next(clients)
    enrolled.enrol()
    enrolled.seed()
    before, _ = check_revoked(fresh.call("GET", "/v1/revoked").json(), fresh.key_server, "demo")
    server = KeyServer.open(folder / "key-server")
    for client in (enrolled, fresh, enrolled):  # twice is once
        server.revoke(client.name)
    assert refused(enrolled.ask()) == (403, "revoked")
    assert refused(enrolled.enrol()) == (403, "revoked")
    assert refused(fresh.enrol()) == (403, "revoked")
    answer = fresh.call("GET", "/v1/revoked").json()
    serial, names = check_revoked(answer, fresh.key_server, "demo")
    assert serial == before + 2
    assert names >= {enrolled.name, fresh.name}
    assert answer["federation"] == "demo"
    for wrong in ({"serial": serial - 1}, {"clients": []}, {"signature": "AAAA"}, {"serial": True}, {"clients": "a"}):
        with pytest.raises(TrustError):
            check_revoked(answer | wrong, fresh.key_server, "demo")
    with pytest.raises(TrustError):
        check_revoked(answer, fresh.key_server, "other")
    with pytest.raises(TrustError):
        check_revoked(answer, fresh.signing.public, "demo")
    with pytest.raises(ConfigError, match="is revoked: choose another name"):
        server.make_token(enrolled.name, "client")
    with pytest.raises(ConfigError, match="no client 'nobody'"):
        server.revoke("nobody")
