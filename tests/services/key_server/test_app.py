"""The key server as a process on loopback, spoken to over TLS as clients do."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ntkfl.crypto.credentials import CREDENTIAL_HEADER, Credential, sign_request
from ntkfl.crypto.hpke import SealingKey, SigningKey, bind, seal
from ntkfl.deployment.demo_setup import DemoSetup, init
from ntkfl.errors import Refused, TrustError
from ntkfl.services.key_server.app import KeyServer
from ntkfl.services.key_server.key_protocol import check_revoked, open_seed
from tests.deployment.federation import valid
from tests.services.fixtures import RUN, SEED_PATH, Person, refused, start
from tests.services.processes import Process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trial federation of many clients, so that every test has some of its own."""
    folder = tmp_path_factory.mktemp("federation")
    (folder / "run.toml").write_text(RUN)
    init(folder / "trial", folder / "run.toml", DemoSetup(clients=30))
    return folder / "trial"


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[Process]:
    with start(folder) as process:
        yield process


@pytest.fixture
def people(process: Process, folder: Path, used: Iterator[int]) -> Iterator[Person]:
    """Clients nobody has used yet."""
    return (Person(folder / "clients" / f"client-{number}", process.urls["key-server"]) for number in used)


@pytest.fixture(scope="module")
def used() -> Iterator[int]:
    return iter(range(30))


def test_health(people: Iterator[Person]) -> None:
    assert next(people).call("GET", "/health").json()["service"] == "key-server"


def test_who_does_not_pin_the_authority_does_not_connect(process: Process) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(process.urls["key-server"] + "/health", trust_env=False)


def test_two_clients_get_the_same_seed_each_in_a_seal_of_its_own(people: Iterator[Person]) -> None:
    one, other = next(people), next(people)
    for person in (one, other):
        assert person.enrol().status_code == 200
        issued = Credential.check(person.credential, person.key_server, "trial")
        assert (issued.client, issued.role) == (person.name, "client")
        assert (issued.sealing_key, issued.signing_key) == (person.sealing.public.hex(), person.signing.public.hex())
    assert one.seed() == other.seed() == one.seed()
    assert len(one.seed()) == 32
    answer = one.ask().json()
    assert (answer["federation"], answer["run"], answer["client"]) == ("trial", "run-0", one.name)
    for wrong in (
        (other.sealing, one.key_server, "trial", "run-0", one.name),
        (one.sealing, other.signing.public, "trial", "run-0", one.name),
        (one.sealing, one.key_server, "trial2", "run-0", one.name),
        (one.sealing, one.key_server, "trial", "run-1", one.name),
        (one.sealing, one.key_server, "trial", "run-0", other.name),
    ):
        with pytest.raises(TrustError):
            open_seed(answer, *wrong)
    raw = base64.b64decode(answer["sealed"])
    with pytest.raises(TrustError, match="seal does not open"):  # whatever the signature says
        other.sealing.open(raw, bind("ntkfl seed v1", "trial", "run-0", one.name))


def test_a_seed_that_was_changed_or_comes_from_another_is_refused(people: Iterator[Person]) -> None:
    person = next(people)
    person.enrol()
    answer = person.ask().json()
    names = (person.sealing, person.key_server, "trial", "run-0", person.name)
    sealed = bytearray(base64.b64decode(answer["sealed"]))
    sealed[40] ^= 1
    stranger = seal(person.sealing.public, bytes(32), bind("ntkfl seed v1", "trial", "run-0", person.name))
    for changes in (
        {"sealed": base64.b64encode(sealed).decode()},
        {"sealed": base64.b64encode(stranger).decode()},
        {"signature": base64.b64encode(bytes(64)).decode()},
        {"signature": None},
        {"sealed": 5},
        {"sealed": "ρ"},
    ):
        with pytest.raises(TrustError):
            open_seed(answer | changes, *names)
    with pytest.raises(TrustError):
        open_seed({}, *names)
    with pytest.raises(TrustError):
        open_seed(["no", "object"], *names)  # type: ignore[arg-type]


def test_an_evaluator_enrols_as_one(process: Process, folder: Path) -> None:
    person = Person(folder / "clients" / "evaluator-0", process.urls["key-server"])
    person.enrol()
    assert Credential.check(person.credential, person.key_server, "trial").role == "evaluator"
    assert len(person.seed()) == 32


def test_a_token_is_for_one_client(people: Iterator[Person]) -> None:
    one, other = next(people), next(people)
    assert refused(one.enrol(token=one.name + "." + "A" * 43)) == (403, "bad-token")
    assert refused(one.enrol(token="")) == (422, "invalid")
    assert refused(one.enrol(token=other.token)) == (403, "bad-token")
    assert refused(one.enrol(client=other.name)) == (403, "bad-token")
    assert refused(one.enrol(client="nobody")) == (403, "bad-token")
    assert one.enrol().status_code == other.enrol().status_code == 200


def test_a_used_token_serves_its_own_keys_again_and_no_others(people: Iterator[Person]) -> None:
    person = next(people)
    assert person.enrol().json() == person.enrol().json()
    kept = person.sealing, person.signing
    for person.sealing, person.signing in (
        (SealingKey.generate(), kept[1]),
        (kept[0], SigningKey.generate()),
        (SealingKey.generate(), SigningKey.generate()),
    ):
        assert refused(person.enrol()) == (409, "already-enrolled")
    person.sealing, person.signing = kept
    assert len(person.seed()) == 32


def test_keys_nobody_can_use_are_refused(people: Iterator[Person]) -> None:
    person, other = next(people), SigningKey.generate()

    def enrol(sealing: bytes, signing: bytes, proof: bytes) -> tuple[int, str]:
        keys = {"sealing_key": sealing.hex(), "signing_key": signing.hex(), "proof": proof.hex()}
        return refused(person.enrol(**keys))

    context = bind("ntkfl enrolment v1", "trial", person.name)
    for small in (bytes(32), bytes([1]) + bytes(31)):  # sealed to which anybody could read
        assert enrol(small, person.signing.public, person.signing.sign(small, context)) == (422, "invalid-key")
    good = person.sealing.public
    nobody = bytes([1]) + bytes(31)  # under this Ed25519 key, this is everybody's signature of everything
    for key in (nobody, bytes([1]) + bytes(30) + bytes([0x80])):
        assert enrol(good, key, nobody + bytes(32)) == (422, "invalid-key")
    for proof in (bytes(64), other.sign(good, context), person.signing.sign(good, bind("other", "trial", person.name))):
        assert enrol(good, person.signing.public, proof) == (422, "invalid-key")
    for key in ("", "00" * 31, "zz" * 32, person.sealing.public.hex().upper() + " "):
        assert refused(person.enrol(sealing_key=key)) == (422, "invalid")
    assert person.enrol().status_code == 200


def test_only_who_signs_with_the_credential_s_key_gets_a_seed(people: Iterator[Person]) -> None:
    one, other = next(people), next(people)
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


def test_other_runs_and_federations_get_nothing(people: Iterator[Person], folder: Path) -> None:
    person = next(people)
    person.enrol()
    assert refused(person.ask("/v1/runs/run-9/seed")) == (404, "unknown-run")
    key = SigningKey.load(folder / "key-server" / "signing-key.pem")
    names = (person.name, "client", person.sealing.public.hex(), person.signing.public.hex(), *valid())
    assert refused(person.ask(credential=Credential("other", *names).issue(key))) == (401, "unauthenticated")
    stranger = Credential("trial", *names).issue(SigningKey.generate())
    assert refused(person.ask(credential=stranger)) == (401, "unauthenticated")
    never = Credential("trial", "never-enrolled", *names[1:]).issue(key)
    assert refused(person.ask(credential=never)) == (403, "unknown-client")


def test_a_new_run_has_a_new_seed(people: Iterator[Person], folder: Path) -> None:
    person = next(people)
    person.enrol()
    server = KeyServer.open(folder / "key-server")
    server.add_run("run-1")
    assert person.seed("/v1/runs/run-1/seed") != person.seed()
    with pytest.raises(Refused, match="one ρ for ever"):
        server.add_run("run-1")
    assert server.runs() == ["run-0", "run-1"]


def test_the_first_requests_all_at_once_get_one_seed(people: Iterator[Person], folder: Path) -> None:
    persons = [next(people) for _ in range(4)]
    KeyServer.open(folder / "key-server").add_run("race")
    with ThreadPoolExecutor() as pool:
        assert {response.status_code for response in pool.map(Person.enrol, persons)} == {200}
        assert len(set(pool.map(lambda person: person.seed("/v1/runs/race/seed"), persons))) == 1


def test_revocation_stops_service_and_is_told_to_others(people: Iterator[Person], folder: Path) -> None:
    enrolled, fresh = next(people), next(people)
    enrolled.enrol()
    enrolled.seed()
    before, _ = check_revoked(fresh.call("GET", "/v1/revoked").json(), fresh.key_server, "trial")
    server = KeyServer.open(folder / "key-server")
    for person in (enrolled, fresh, enrolled):  # twice is once
        server.revoke(person.name)
    assert refused(enrolled.ask()) == (403, "revoked")
    assert refused(enrolled.enrol()) == (403, "revoked")
    assert refused(fresh.enrol()) == (403, "revoked")
    answer = fresh.call("GET", "/v1/revoked").json()
    serial, names = check_revoked(answer, fresh.key_server, "trial")
    assert serial == before + 2
    assert names >= {enrolled.name, fresh.name}
    assert answer["federation"] == "trial"
    for wrong in ({"serial": serial - 1}, {"clients": []}, {"signature": "AAAA"}, {"serial": True}, {"clients": "a"}):
        with pytest.raises(TrustError):
            check_revoked(answer | wrong, fresh.key_server, "trial")
    with pytest.raises(TrustError):
        check_revoked(answer, fresh.key_server, "other")
    with pytest.raises(TrustError):
        check_revoked(answer, fresh.signing.public, "trial")
    with pytest.raises(Refused, match="is revoked: choose another name"):
        server.make_token(enrolled.name, "client")
    with pytest.raises(Refused, match="no client 'nobody'"):
        server.revoke("nobody")


def test_bodies_are_bounded_and_checked(people: Iterator[Person]) -> None:
    person = next(people)
    assert refused(person.call("POST", "/v1/enrol", content=bytes(20_000))) == (413, "too-large")
    for body in (b"{", b"[]", b"null", b'{"token": 5}'):
        response = person.call("POST", "/v1/enrol", content=body, headers={"content-type": "application/json"})
        assert refused(response) == (422, "invalid")
    response = person.enrol(more=person.token)
    assert refused(response) == (422, "invalid")
    assert person.token not in response.text
    assert person.enrol().status_code == 200
