"""A demo federation on loopback for tests of the shuffler: its process, clients that sign, and the aggregator."""

from __future__ import annotations

import itertools
import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

import httpx

from ntkfl.crypto.credentials import Credential
from ntkfl.crypto.hpke import SEAL_BYTES, SealingKey, SigningKey
from ntkfl.crypto.row_frames import Announced, BatchKey, pack_rows, seal_rows
from ntkfl.deployment.contract import Federation
from ntkfl.deployment.demo_setup import DemoSetup, init
from ntkfl.services.announcement import Announcement
from ntkfl.services.http.signing import sign_request
from ntkfl.services.shuffler.batch import Batch
from ntkfl.wire import Message
from tests.services.processes import Process

TERMS = 'inputs = [4]\noutputs = 2\nclients_per_round = 2\n[method]\nname = "ntk-fl"\n'
PREFIX = "/v1/runs/run-0"
ROW_BYTES = 16 + SEAL_BYTES


def valid(seconds: int = 3600) -> tuple[int, int]:
    """When a credential begins and ends that ends in that many seconds."""
    now = int(time.time())
    return now - 7200, now + seconds


def free_port() -> int:
    """Below those that a system hands out by itself: another test's connection may take one of these at any time."""
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Deployment:
    """The folders of all roles; the shuffler's process is started by `start`."""

    def __init__(self, folder: Path) -> None:
        (folder / "run.toml").write_text(TERMS)
        self.folder = folder / "demo"
        self.peers = init(self.folder, folder / "run.toml", DemoSetup(key_server_port=free_port()))
        self.signer = SigningKey.load(self.folder / "key-server" / "signing-key.pem")
        self.opener = SealingKey.generate()  # of all rounds, for once
        self.announced: dict[BatchKey, Announced] = {}  # the last that the aggregator signed under a key
        self._rounds = itertools.count(1)
        self.urls: dict[str, str] = {}
        self._connections: list[httpx.Client] = []

    def start(self) -> Process:
        command = ("-m", "ntkfl", "serve", "shuffler", self.folder / "shuffler")
        log = "--log-format", "json", "--log-level", "debug"
        process = Process(*command, "--port", "0", "--aggregator-port", "0", *log, listeners=2)
        self.urls = process.urls
        return process

    def start_key_server(self) -> Process:
        return Process("-m", "ntkfl", "serve", "key-server", self.folder / "key-server")

    def next_key(self) -> BatchKey:
        return BatchKey(next(self._rounds), 0)

    def client(self, name: str, role: str = "client") -> Client:
        return Client(self, name, role, self.peers, self.signer)

    def batch(self, *names: str, **terms: object) -> Batch:
        values = {"max_rows": 2, "row_bytes": ROW_BYTES, "min_clients": 2, "seconds": None} | terms
        return Batch(self.next_key(), names, **values)  # type: ignore[arg-type]

    def connection(self, context: ssl.SSLContext) -> httpx.Client:
        self._connections.append(httpx.Client(verify=context, timeout=60, trust_env=False))
        return self._connections[-1]

    def hang_up(self) -> None:
        """Close the connections of all clients and aggregators made so far."""
        while self._connections:
            self._connections.pop().close()

    def tls(self, certificate: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.folder / "aggregator" / "ca.pem")
        if certificate:
            context.load_cert_chain(*certificate)
        return context

    def aggregator(self) -> Aggregator:
        return Aggregator(self)


class Client:
    """Signs with a credential of `issuer`, which need not be the key server's, for `peers.federation`."""

    def __init__(self, deployment: Deployment, name: str, role: str, peers: Federation, issuer: SigningKey) -> None:
        self.name, self.deployment, self.key = name, deployment, SigningKey.generate()
        keys = SealingKey.generate().public.hex(), self.key.public.hex()
        self.credential = Credential(peers.federation, name, role, *keys, *valid()).issue(issuer)
        self.http = deployment.connection(deployment.tls())

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, prefix: str = PREFIX
    ) -> httpx.Response:
        if headers is None:
            headers = sign_request(self.credential, self.key, method, prefix + path, body)
        url = self.deployment.urls["shuffler"] + prefix + path
        return self.http.request(method, url, content=body or None, headers=headers)

    def frame(self, key: BatchKey, count: int = 2) -> bytes:
        """Rows that say whose they are, to whoever can open them."""
        rows = [f"{self.name}/{i}".encode().ljust(16) for i in range(count)]
        peers = self.deployment.peers
        said = self.deployment.announced.get(key, Announced(key, bytes(32)))
        sealed = seal_rows(rows, self.deployment.opener.public, peers.federation, peers.run, said)
        return pack_rows(said, sealed)

    def submit(self, key: BatchKey, count: int = 2) -> httpx.Response:
        return self.ask("POST", "/rows", self.frame(key, count))


class Aggregator:
    def __init__(self, deployment: Deployment) -> None:
        folder = deployment.folder / "aggregator"
        context = deployment.tls((folder / "tls.pem", folder / "tls-key.pem"))
        self.signer = SigningKey.load(folder / "signing-key.pem")
        self.names = deployment.peers.federation, deployment.peers.run
        self.deployment = deployment
        self.url, self.http = deployment.urls["shuffler-aggregator"], deployment.connection(context)

    def ask(self, method: str, path: str, body: bytes = b"", prefix: str = PREFIX) -> httpx.Response:
        return self.http.request(method, self.url + prefix + path, content=body or None, timeout=30)

    def signed(self, batch: Batch, message: Message | None = None) -> bytes:
        """The announcement that asks for a batch: the same bytes for the same one."""
        asked = Announcement("exchange", batch.key, batch, message, self.deployment.opener.public)
        signed = asked.sign(self.signer, *self.names)
        self.deployment.announced[batch.key] = Announced.of(batch.key, signed)
        return signed

    def publish(self, batch: Batch) -> httpx.Response:
        return self.ask("POST", "/announcements", self.signed(batch))

    def on(self, key: BatchKey, method: str, action: str = "") -> httpx.Response:
        return self.ask(method, f"/batches/{key.round}/{key.exchange}{action}")


def refused(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]
