"""The services' own OpenAPI documents, and requests made up from them against the services as they run.

Whatever is asked, by whom ever, the answer is one the document names: no 5xx, no crash. The same requests every time,
unless NTKFL_OPENAPI_REQUESTS says how many an operation shall get: then new ones (`make fuzz`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis: make fuzz")

import requests
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ntkfl.crypto.hpke import SigningKey
from ntkfl.services.http.long_poll import LongPollEvent
from ntkfl.services.http.signing import sign_request
from ntkfl.services.key_server.app import key_server_app
from ntkfl.services.key_server.store import KeyServer
from ntkfl.services.shuffler.aggregator_app import aggregator_app
from ntkfl.services.shuffler.client_app import client_app
from ntkfl.services.shuffler.store import Shuffler
from tests.deployment.federation import Client, Deployment
from tests.services.fixtures import EnrollingClient
from tests.services.processes import Process

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
ASKED = os.environ.get("NTKFL_OPENAPI_REQUESTS", "")
EXAMPLES = int(ASKED or 30)  # of each operation: sound values, and unsound ones
pytestmark = pytest.mark.timeout(max(300, 3 * EXAMPLES))
HEALTH = ("GET /health", "GET /ready")
Signer = Callable[[str, str, bytes], dict[str, str]]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return Deployment(tmp_path_factory.mktemp("openapi"))


@pytest.fixture(scope="module")
def shuffler(deployment: Deployment) -> Iterator[Process]:
    with deployment.start() as process:
        yield process


@pytest.fixture(scope="module")
def key_server(deployment: Deployment) -> Iterator[Process]:
    with Process("-m", "ntkfl", "serve", "key-server", deployment.folder / "key-server", "--port", "0") as process:
        yield process


def session(deployment: Deployment, certificate: bool = False) -> requests.Session:
    """Trusts the demo's authority alone; with `certificate`, as the aggregator."""
    made = requests.Session()
    made.trust_env = False
    folder = deployment.folder / "aggregator"
    made.verify = str(folder / "ca.pem")
    if certificate:
        made.cert = (str(folder / "tls.pem"), str(folder / "tls-key.pem"))
    return made


def fuzz(app: FastAPI, url: str, http: requests.Session, sign: Signer | None = None) -> dict[str, set[int]]:
    """Requests to every operation of the service at `url`, by the document of an `app` like it; with `sign`, half of
    them signed. The statuses met, by operation.
    """
    schema = schemathesis.openapi.from_dict(app.openapi())
    met: dict[str, set[int]] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        met[f"{operation.method.upper()} {operation.path}"] = _ask(operation, url, http, sign)
    return met


def _ask(operation: Any, url: str, http: requests.Session, sign: Signer | None) -> set[int]:
    statuses: set[int] = set()
    sound = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    unsound = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

    @settings(
        max_examples=EXAMPLES,
        derandomize=not ASKED,
        print_blob=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=sound | unsound, signed=st.booleans(), run=st.sampled_from(["run-0", "run-0", None]))
    def ask(case: schemathesis.Case, signed: bool, run: str | None) -> None:
        if run is not None and "run" in case.path_parameters:
            case.path_parameters["run"] = run  # a made-up one is nearly never there
        if signed and str(case.query.get("after", "")).isdecimal():
            case.query["after"] = 0  # beyond the newest announcement, the answer is worth a wait
        request = http.prepare_request(requests.Request(**case.as_transport_kwargs(base_url=url)))
        if sign is not None and signed:
            body = request.body.encode() if isinstance(request.body, str) else request.body or b""
            request.headers.update(sign(str(request.method), request.path_url, body))
        answer = http.send(request, timeout=60, verify=http.verify, cert=http.cert)
        statuses.add(answer.status_code)
        case.validate_response(answer, checks=CHECKS)

    ask()
    return statuses


def test_the_key_server(deployment: Deployment, key_server: Process) -> None:
    person = EnrollingClient(deployment.folder / "clients" / "client-0", key_server.urls["key-server"])
    assert person.enrol().status_code == 200

    def sign(method: str, path: str, body: bytes) -> dict[str, str]:
        return sign_request(person.credential, person.signing, method, path, body)

    app = key_server_app(KeyServer.open(deployment.folder / "key-server"))
    met = fuzz(app, key_server.urls["key-server"], session(deployment), sign)
    seed = "POST /v1/runs/{run}/seed"
    assert set(met) == {*HEALTH, "POST /v1/enrol", "POST /v1/renew", "GET /v1/revoked", seed}
    assert {200, 401} <= met["POST /v1/renew"]
    assert {200, 401} <= met["POST /v1/runs/{run}/seed"]
    assert 422 in met["POST /v1/enrol"]
    assert key_server.stop() == 0
    assert "internal-error" not in key_server.output()


def test_the_shuffler_for_clients(deployment: Deployment, shuffler: Process) -> None:
    aggregator = deployment.aggregator()
    batch = deployment.batch("a", "b")
    assert aggregator.publish(batch).status_code == 200
    client: Client = deployment.client("a", "evaluator")

    def sign(method: str, path: str, body: bytes) -> dict[str, str]:
        return sign_request(client.credential, client.key, method, path, body)

    app = client_app(Shuffler(), deployment.peers, LongPollEvent(), SigningKey.generate())
    met = fuzz(app, shuffler.urls["shuffler"], session(deployment), sign)
    prefix = "/v1/runs/{run}"
    sent = {f"POST {prefix}/{name}" for name in ("hello", "rows", "reports", "sums")}
    assert set(met) == sent | {*HEALTH, f"GET {prefix}/announcement"}
    assert {200, 401} <= met[f"POST {prefix}/hello"]
    assert 401 in met[f"POST {prefix}/rows"]


def test_the_shuffler_for_the_aggregator(deployment: Deployment, shuffler: Process) -> None:
    app = aggregator_app(Shuffler(), deployment.peers, LongPollEvent(), _nothing)
    met = fuzz(app, shuffler.urls["shuffler-aggregator"], session(deployment, certificate=True))
    assert len(met) == 11  # its nine operations, and its health
    assert met["GET /health"] == {200}
    assert 404 in met["GET /v1/runs/{run}/batches/{round}/{exchange}"]
    assert shuffler.stop() == 0
    assert "internal-error" not in shuffler.output()


async def _nothing() -> None:
    """In place of looking up who is revoked: the app is asked for its document alone."""


def test_the_documents_name_every_refusal_with_one_shape(deployment: Deployment) -> None:
    document = client_app(Shuffler(), deployment.peers, LongPollEvent(), SigningKey.generate()).openapi()
    for path in document["paths"].values():
        for operation in path.values():
            refusals = {s: r for s, r in operation["responses"].items() if int(s) >= 400}
            assert {"400", "408", "413", "503"} <= set(refusals)
            shapes = {r["content"]["application/json"]["schema"]["$ref"] for r in refusals.values()}
            assert shapes == {"#/components/schemas/Problem"}
