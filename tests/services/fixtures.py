"""Clients of a demo federation's key server, speaking for themselves over TLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from ntkfl.deployment.contract import Federation

from ntkfl.crypto.hpke import SealingKey, SigningKey
from ntkfl.services.http.signing import sign_request
from ntkfl.services.key_server.key_protocol import enrolment, open_run_secret, token_client
from tests.services.processes import Process

RUN = """
inputs = [64]
outputs = 10
rounds = 3
clients_per_round = 2
[method]
name = "ntk-fl"
"""
SEED_PATH = "/v1/runs/run-0/seed"


def start(folder: Path) -> Process:
    log = "--log-format", "json", "--log-level", "debug"
    return Process("-m", "ntkfl", "serve", "key-server", folder / "key-server", "--port", "0", *log)


@dataclass
class EnrollingClient:
    """A client with its folder and keys, as it would speak for itself."""

    folder: Path
    url: str
    sealing: SealingKey = field(default_factory=SealingKey.generate)
    signing: SigningKey = field(default_factory=SigningKey.generate)
    credential: str = ""

    def __post_init__(self) -> None:
        self.peers = Federation.read(self.folder)
        self.key_server = bytes.fromhex(self.peers.key_server.signing_key)
        self.token = (self.folder / "token").read_text().strip()
        self.name = token_client(self.token)

    def call(self, method: str, path: str, **options: object) -> httpx.Response:
        verify = ssl.create_default_context(cafile=self.folder / "ca.pem")
        with httpx.Client(base_url=self.url, verify=verify, trust_env=False, timeout=30) as client:
            return client.request(method, path, **options)  # type: ignore[arg-type]

    def enrol(self, **changes: str) -> httpx.Response:
        body = enrolment(self.token, self.peers.federation, self.sealing, self.signing) | changes
        response = self.call("POST", "/v1/enrol", json=body)
        if response.status_code == 200:
            self.credential = response.json()["credential"]
        return response

    def ask(self, path: str = SEED_PATH, **signs: object) -> httpx.Response:
        key = signs.get("key", self.signing)
        headers = sign_request(str(signs.get("credential", self.credential)), key, "POST", path, b"")  # type: ignore[arg-type]
        return self.call("POST", path, headers=headers)

    def seed(self, path: str = SEED_PATH) -> bytes:
        response = self.ask(path)
        assert response.status_code == 200, response.text
        names = (self.peers.federation, path.split("/")[3], self.name)
        return open_run_secret(response.json(), self.sealing, self.key_server, *names).reveal()


def refused(response: httpx.Response) -> tuple[int, str]:
    assert set(response.json()) == {"error", "message"}
    return response.status_code, response.json()["error"]
