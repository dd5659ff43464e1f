"""The shuffler as a process on loopback: clients that sign over TLS, the aggregator with its certificate."""

from __future__ import annotations

import json
import ssl
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tests.deployment.federation import PREFIX, ROW_BYTES, Client, Deployment, refused

from ntkfl.crypto.hpke import SigningKey
from ntkfl.crypto.receipt import check_receipt
from ntkfl.crypto.row_frames import Announced, open_row, pack_rows, unpack_rows
from ntkfl.services.http.signing import CREDENTIAL_HEADER, SIGNATURE_HEADER, sign_request
from tests.services.processes import Process


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return Deployment(tmp_path_factory.mktemp("federation"))


@pytest.fixture(scope="module")
def process(deployment: Deployment) -> Iterator[Process]:
    with deployment.start() as process:
        yield process


# -- An exchange ------------------------------------------------------------------------------------------------------


def test_an_exchange_from_announcement_to_released_rows(deployment: Deployment, process: Process) -> None:
    clients = [deployment.client(name) for name in ("ada", "bob", "cyd")]
    aggregator = deployment.aggregator()
    for client in clients:
        assert client.ask("POST", "/hello").json() == {"status": "present"}
    assert deployment.client("eva", "evaluator").ask("POST", "/hello").status_code == 200
    assert aggregator.ask("GET", "/clients?role=client").json() == {"clients": ["ada", "bob", "cyd"], "lapsed": []}
    assert aggregator.ask("GET", "/clients?role=evaluator").json() == {"clients": ["eva"], "lapsed": []}
    assert aggregator.ask("GET", "/clients?role=king").status_code == 422

    before = aggregator.ask("GET", "/latest").json()["sequence"]
    batch = deployment.batch("ada", "bob", "cyd")
    with ThreadPoolExecutor(3) as pool:  # they wait before there is anything
        waiting = [pool.submit(client.ask, "GET", f"/announcement?after={before}") for client in clients]
        time.sleep(0.3)
        assert not any(answer.done() for answer in waiting)
        published = time.perf_counter()
        assert aggregator.publish(batch).json() == {"sequence": before + 1}
        answers = [answer.result() for answer in waiting]
        assert time.perf_counter() - published < 5
    assert {answer.content for answer in answers} == {aggregator.signed(batch)}
    assert {answer.headers["ntkfl-sequence"] for answer in answers} == {str(before + 1)}
    assert aggregator.ask("GET", "/latest").json() == {"sequence": before + 1, "key": list(batch.key)}

    receipts: set[bytes] = set()
    for client in clients:
        assert refused(aggregator.on(batch.key, "POST", "/release")) == (425, "not-ready")
        receipt = client.submit(batch.key)
        assert set(receipt.json()) == {"status", "receipt"}
        receipts.add(receipt.content)
        assert not {"date", "content-type", "content-length", "cache-control"} ^ set(receipt.headers)
    (content,) = receipts  # a receipt says nothing of rows, nor of whose they are
    shuffler = bytes.fromhex(deployment.peers.shuffler.signing_key)
    said = Announced.of(batch.key, aggregator.signed(batch))
    check_receipt(bytes.fromhex(json.loads(content)["receipt"]), shuffler, "demo", "run-0", said)
    assert refused(clients[0].submit(batch.key)) == (409, "replayed")
    status = aggregator.on(batch.key, "GET").json()
    assert status == {"state": "ready", "clients": 3, "rows": None, "seconds": None, "missing": []}
    released = aggregator.on(batch.key, "POST", "/release")
    answered, rows = unpack_rows(released.content, row_bytes=ROW_BYTES)
    assert answered == said
    opened = [open_row(deployment.opener, row, "demo", "run-0", said).decode().strip() for row in rows]
    assert Counter(opened) == Counter(["ada/0", "ada/1", "bob/0", "bob/1", "cyd/0", "cyd/1"])
    assert aggregator.on(batch.key, "POST", "/release").content == released.content
    assert aggregator.on(batch.key, "DELETE").json() == {"status": "forgotten"}
    assert refused(aggregator.on(batch.key, "POST", "/release")) == (410, "forgotten")
    assert refused(clients[0].submit(batch.key)) == (410, "late")


# -- Strangers and damage ---------------------------------------------------------------------------------------------


def test_only_the_key_servers_clients_of_this_federation_and_run_are_heard(
    deployment: Deployment, process: Process
) -> None:
    batch = deployment.batch("ada", "bob")
    assert deployment.aggregator().publish(batch).status_code == 200
    ada = deployment.client("ada")
    frame = ada.frame(batch.key)
    good = sign_request(ada.credential, ada.key, "POST", f"{PREFIX}/rows", frame)
    elsewhere = deployment.peers.model_copy(update={"federation": "elsewhere"})
    for stranger in (
        Client(deployment, "ada", "client", deployment.peers, SigningKey.generate()),
        Client(deployment, "ada", "client", elsewhere, deployment.signer),
    ):
        assert refused(stranger.ask("POST", "/rows", frame)) == (401, "unauthenticated")
        assert refused(stranger.ask("GET", "/announcement?after=0")) == (401, "unauthenticated")
    changed = frame[:-1] + bytes([frame[-1] ^ 1])
    not_his = {CREDENTIAL_HEADER: good[CREDENTIAL_HEADER]} | {
        SIGNATURE_HEADER: sign_request(ada.credential, SigningKey.generate(), "POST", f"{PREFIX}/rows", frame)[
            SIGNATURE_HEADER
        ]
    }
    for body, headers in (
        (frame, {}),
        (frame, not_his),
        (frame, {CREDENTIAL_HEADER: good[CREDENTIAL_HEADER]}),
        (frame, {SIGNATURE_HEADER: good[SIGNATURE_HEADER]}),
        (frame, good | {SIGNATURE_HEADER: "é".encode().hex()}),
        (changed, good),
    ):
        assert ada.ask("POST", "/rows", body, headers).status_code == 401
    poll = sign_request(ada.credential, ada.key, "GET", f"{PREFIX}/announcement?after=0", b"")
    assert ada.ask("GET", "/announcement?after=1", headers=poll).status_code == 401  # signed for another question
    assert refused(ada.ask("POST", "/rows", frame, prefix="/v1/runs/run-1")) == (404, "unknown-run")
    eve = deployment.client("eve")
    assert refused(eve.submit(batch.key)) == (403, "not-asked")
    assert deployment.aggregator().on(batch.key, "GET").json()["clients"] == 0
    assert ada.ask("POST", "/rows", frame, good).status_code == 200


def test_damaged_and_oversized_submissions_are_refused_and_leave_nothing(
    deployment: Deployment, process: Process
) -> None:
    batch = deployment.batch("ada", "bob")
    aggregator = deployment.aggregator()
    assert aggregator.publish(batch).status_code == 200
    ada = deployment.client("ada")
    frame, said = ada.frame(batch.key), deployment.announced[batch.key]
    flipped = bytearray(frame)
    flipped[len(frame) // 2] ^= 16
    for body in (frame[:-1], frame[:10], bytes(flipped), frame + b"\0", b"NTKR"):
        assert refused(ada.ask("POST", "/rows", body)) == (422, "malformed")
    for count in (1, 3):
        assert refused(ada.submit(batch.key, count=count)) == (422, "row-count")
    assert refused(ada.ask("POST", "/rows", pack_rows(said, [bytes(8)] * 2))) == (422, "row-size")
    assert refused(ada.ask("POST", "/rows", pack_rows(said, [bytes(8)] * 4))) == (422, "row-count")
    assert refused(ada.submit(batch.key, count=1100)) == (413, "too-large")
    assert refused(ada.ask("POST", "/rows", bytes(20 << 20))) == (413, "too-large")
    assert refused(ada.ask("POST", "/hello", bytes(1 << 17))) == (413, "too-large")
    assert ada.ask("GET", "/announcement?after=-1").status_code == 422

    def endless() -> Iterator[bytes]:
        for _ in range(64):
            yield bytes(1 << 16)

    headers = sign_request(ada.credential, ada.key, "POST", f"{PREFIX}/rows", b"")
    url = deployment.urls["shuffler"] + f"{PREFIX}/rows"
    assert refused(ada.http.post(url, content=endless(), headers=headers)) == (
        413,
        "too-large",
    )  # undeclared
    assert refused(ada.http.post(url, content=bytes(20 << 20))) == (401, "unsigned")  # before it is read
    assert aggregator.on(batch.key, "GET").json()["clients"] == 0
    assert ada.ask("POST", "/rows", frame).status_code == 200


def test_only_the_aggregators_certificate_is_accepted_on_its_port(deployment: Deployment, process: Process) -> None:
    url = deployment.urls["shuffler-aggregator"]
    own = deployment.folder / "shuffler"  # signed by the services' authority, not by the aggregator's
    for context in (deployment.tls(), deployment.tls((own / "tls.pem", own / "tls-key.pem"))):
        with (
            httpx.Client(verify=context, trust_env=False) as http,
            pytest.raises((httpx.TransportError, ssl.SSLError)),
        ):
            http.get(f"{url}{PREFIX}/latest")
    ada = deployment.client("ada")
    for path in ("/latest", "/clients", "/batches/1/0"):  # nor on the clients' port
        assert ada.ask("GET", path).status_code == 404
    assert ada.ask("POST", "/announcements", b"\0\0\0\0mine").status_code == 404
    assert deployment.aggregator().ask("GET", "/latest").status_code == 200
