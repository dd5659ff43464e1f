"""Every endpoint, called without the right to: endpoints are found in the applications, not listed by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from tests.deployment.federation import Deployment

from ntkfl.crypto.certificates import Authority
from ntkfl.crypto.hpke import SigningKey
from ntkfl.services.http.signing import CREDENTIAL_HEADER, SIGNATURE_HEADER, sign_request
from ntkfl.services.key_server.app import key_server_app
from ntkfl.services.key_server.store import KeyServer
from ntkfl.services.shuffler.aggregator_app import aggregator_app
from ntkfl.services.shuffler.client_app import client_app
from ntkfl.services.shuffler.long_poll import LongPollEvent
from ntkfl.services.shuffler.store import Shuffler

# What anybody may ask: whether a service is there, and the list of revoked clients, which the key server signs.
PUBLIC = {(service, path) for service in ("key-server", "shuffler") for path in ("/health", "/ready")}
PUBLIC |= {("key-server", "/v1/revoked")}
ENROL = ("key-server", "/v1/enrol")  # by a token in its body: see below
Endpoint = tuple[str, str, str]  # service, method, path


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("endpoints"))
    with made.start_key_server() as key_server, made.start() as shuffler:
        made.urls = {**key_server.urls, **shuffler.urls}
        yield made
        made.hang_up()


def endpoints(deployment: Deployment) -> list[Endpoint]:
    async def refresh() -> None:
        pass

    peers, shuffler = deployment.peers, Shuffler()
    apps: list[FastAPI] = [
        key_server_app(KeyServer.open(deployment.folder / "key-server")),
        client_app(shuffler, peers, LongPollEvent(), SigningKey.generate()),
        aggregator_app(shuffler, peers, LongPollEvent(), refresh),
    ]
    found = []
    for app in apps:
        assert all(isinstance(route, APIRoute) for route in app.routes)  # no mounted files, no generated pages
        for route in app.routes:
            assert isinstance(route, APIRoute)
            path = re.sub(r"\{(\w+)\}", lambda m: {"run": "run-0"}.get(m[1], "1"), route.path)
            found += [(app.title, method, path) for method in route.methods]
    return found


def test_all_three_applications_are_looked_at(deployment: Deployment) -> None:
    found = endpoints(deployment)
    assert len(found) >= 14
    assert {service for service, _, _ in found} == {"key-server", "shuffler", "shuffler-aggregator"}


def test_nobody_gets_in_without_a_credential_and_a_signature_of_its_owner(deployment: Deployment) -> None:
    """No headers; one of two; a stranger's credential; a client's credential signed by another key, for another path,
    for another body; another federation's: always 401, whatever is asked.
    """
    known, thief = deployment.client("ada"), SigningKey.generate()
    stranger = deployment.client("eve")
    stranger.credential = stranger.credential[:-8] + "AAAAAAA="
    tried = 0
    with httpx.Client(verify=deployment.tls(), trust_env=False) as http:
        for service, method, path in endpoints(deployment):
            if service == "shuffler-aggregator" or (service, path) in (*PUBLIC, ENROL):
                continue
            right = sign_request(known.credential, known.key, method, path, b"")
            attempts: list[dict[str, str]] = [
                {},
                {CREDENTIAL_HEADER: known.credential},
                {SIGNATURE_HEADER: right[SIGNATURE_HEADER]},
                {CREDENTIAL_HEADER: "", SIGNATURE_HEADER: ""},
                {"authorization": "Bearer " + known.credential},
                sign_request(stranger.credential, stranger.key, method, path, b""),
                sign_request(known.credential, thief, method, path, b""),
                sign_request(known.credential, known.key, method, path + "x", b""),
                sign_request(known.credential, known.key, method, path, b"another body"),
                sign_request(known.credential, known.key, "DELETE", path, b""),
            ]
            for headers in attempts:
                answer = http.request(method, deployment.urls[service] + path, headers=headers)
                assert answer.status_code == 401, (service, method, path, headers)
                tried += 1
            with suppress(httpx.ReadTimeout):  # let in, to wait for an announcement
                answer = http.request(method, deployment.urls[service] + path, headers=right, timeout=2)
                assert answer.status_code != 401, path
    assert tried >= 50


def test_the_aggregators_port_speaks_to_nobody_without_its_certificate(deployment: Deployment, tmp_path: Path) -> None:
    """Not with a client's credential, not with a service's certificate, not with one of another authority."""
    other = tmp_path / "other.pem"
    other.write_bytes(b"".join(Authority("demo aggregator").client("aggregator")))
    services = deployment.folder / "shuffler"
    certificates = [None, (other, other), (services / "tls.pem", services / "tls-key.pem")]
    client = deployment.client("ada")
    for service, method, path in endpoints(deployment):
        if service != "shuffler-aggregator":
            continue
        headers = sign_request(client.credential, client.key, method, path, b"")
        for certificate in certificates:
            with (
                httpx.Client(verify=deployment.tls(certificate), trust_env=False) as http,
                pytest.raises(httpx.TransportError),
            ):
                http.request(method, deployment.urls[service] + path, headers=headers)


def test_enrolment_needs_the_token_of_that_client(deployment: Deployment) -> None:
    body = {"client": "client-0", "sealing_key": "0" * 64, "signing_key": "0" * 64, "proof": "0" * 128}
    others = (deployment.folder / "clients" / "client-1" / "token").read_text().strip()
    own = (deployment.folder / "clients" / "client-0" / "token").read_text().strip()
    with httpx.Client(verify=deployment.tls(), trust_env=False) as http:
        url = deployment.urls["key-server"] + ENROL[1]
        for token in (others, own[:-1], own + "A", "client-0.", "client-0." + "A" * 43):
            assert http.post(url, json=body | {"token": token}).status_code == 403
        assert http.post(url, json=body | {"client": "nobody", "token": own}).status_code == 403
        assert http.post(url, json=body).status_code == 422
        assert http.post(url, json=body | {"token": own}).status_code == 422  # believed; but those are no keys


def test_nothing_speaks_plain_http(deployment: Deployment) -> None:
    for url in deployment.urls.values():
        with httpx.Client(trust_env=False) as http, pytest.raises(httpx.TransportError):
            http.get(url.replace("https://", "http://") + "/health")
