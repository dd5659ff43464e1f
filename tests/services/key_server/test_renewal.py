"""Credentials and certificates end, and are renewed: real key server and shuffler, on loopback."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.deployment.federation import Deployment, refused, valid

from ntkfl.crypto.credentials import Credential
from ntkfl.errors import Refused
from ntkfl.services.key_server import client as identity_module
from ntkfl.services.key_server.client import Identity
from ntkfl.services.key_server.store import KeyServer
from tests.services.fixtures import EnrollingClient


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("renewal"))
    with made.start_key_server() as key_server, made.start() as shuffler:
        made.urls = {**key_server.urls, **shuffler.urls}
        yield made
        made.hang_up()


@pytest.fixture
def operator(deployment: Deployment) -> KeyServer:
    return KeyServer.open(deployment.folder / "key-server")


@pytest.fixture
def client(deployment: Deployment, operator: KeyServer, request: pytest.FixtureRequest) -> EnrollingClient:
    """A client of this test's own, enrolled for an hour."""
    folder = new_client(deployment, operator, request.node.name[-60:].strip("_"))
    made = EnrollingClient(folder, deployment.urls["key-server"])
    assert made.enrol().status_code == 200
    return made


def new_client(deployment: Deployment, operator: KeyServer, name: str) -> Path:
    from ntkfl.deployment.demo_setup import client_folder

    operator.set_lifetime(3600)
    folder = deployment.folder / "clients" / name
    client_folder(folder, deployment.folder / "key-server", operator.make_token(name, "client"))
    return folder


def read(deployment: Deployment, issued: str) -> Credential:
    return Credential.check(issued, deployment.signer.public, deployment.peers.federation, allow_expired=True)


def test_both_services_refuse_a_credential_that_has_ended(deployment: Deployment, client: EnrollingClient) -> None:
    known = deployment.client("ada")
    assert known.ask("POST", "/hello").status_code == 200
    known.credential = replace(read(deployment, known.credential), ends=valid(-1)[1]).issue(deployment.signer)
    assert refused(known.ask("POST", "/hello")) == (401, "ended")
    for path in ("/rows", "/reports"):
        assert refused(known.ask("POST", path, b"x")) == (401, "ended")
    assert refused(known.ask("GET", "/announcement?after=0")) == (401, "ended")
    assert len(client.seed()) == 32
    ended = replace(read(deployment, client.credential), ends=valid(-1)[1]).issue(deployment.signer)
    assert refused(client.ask(credential=ended)) == (401, "ended")


def test_a_credential_ends_when_it_says(deployment: Deployment, operator: KeyServer) -> None:
    """No clock is changed and nothing is made up: it is good, a second passes, it is not."""
    folder = new_client(deployment, operator, "brief")
    operator.set_lifetime(3)
    brief = EnrollingClient(folder, deployment.urls["key-server"])
    brief.enrol()
    assert len(brief.seed()) == 32
    time.sleep(max(0.0, read(deployment, brief.credential).ends - time.time()) + 0.05)
    assert refused(brief.ask()) == (401, "ended")
    assert refused(brief.ask("/v1/renew")) == (403, "ended")


class Later:
    """The client's own clock, ahead of everybody's."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def time(self) -> float:
        return time.time() + self._seconds

    def monotonic(self) -> float:
        return time.monotonic() + self._seconds


def test_a_revoked_client_cannot_renew(
    deployment: Deployment, operator: KeyServer, client: EnrollingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator.revoke(client.name)
    assert refused(client.ask("/v1/renew")) == (403, "revoked")
    folder = new_client(deployment, operator, "unwanted")
    own = Identity.of(folder)
    operator.revoke("unwanted")
    monkeypatch.setattr(identity_module, "time", Later(2450))
    assert own.current() == own.credential  # it is good for a while, wherever the revocation is not known
    monkeypatch.setattr(identity_module, "time", Later(3700))
    with pytest.raises(Refused, match="is revoked"):
        own.current()


def test_only_the_owner_of_the_enrolled_keys_renews(deployment: Deployment, client: EnrollingClient) -> None:
    assert refused(client.call("POST", "/v1/renew")) == (401, "unsigned")
    assert refused(client.ask("/v1/renew", key=deployment.signer)) == (401, "unauthenticated")
    made_up = replace(read(deployment, client.credential), sealing_key="ab" * 32).issue(deployment.signer)
    assert refused(client.ask("/v1/renew", credential=made_up)) == (403, "unknown-client")
