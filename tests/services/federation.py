"""A federation on loopback: folders, the key server and the shuffler as processes, and who asks them."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from ntkfl.crypto.hpke import SEAL_BYTES, SealingKey, SigningKey
from ntkfl.crypto.row_frames import Announced, BatchKey, pack_rows, seal_rows
from ntkfl.crypto.signed import sign_request
from ntkfl.errors import Refused
from ntkfl.services import setup
from ntkfl.services.announcement import Batch, Head
from ntkfl.services.clients import HttpClient, Identity, ShufflerClient
from ntkfl.services.peers import FILE, Peers, RoundTerms
from tests.fork_server import Child

RUN, TERMS, ROW_BYTES = "run-1", "ab" * 32, 10


@contextmanager
def refusal(reason: str) -> Iterator[None]:
    with pytest.raises(Refused) as caught:
        yield
    assert caught.value.reason == reason


class Process:
    """`python ARGUMENTS`, once it listens at `url`; `output()` is all that it ever said, on both streams."""

    def __init__(self, log: Path, *arguments: str | Path) -> None:
        self._log = log
        with log.open("w") as both:
            self._child = Child(arguments, both.fileno(), both.fileno())
        while not (found := re.search(r"^listening (https://\S+) service=\S+$", self.output(), re.MULTILINE)):
            assert self._child.poll() is None, f"{arguments} does not listen:\n{self.output()}"
            time.sleep(0.02)
        self.url = found[1]

    def stop(self, number: int = signal.SIGTERM) -> None:
        self._child.send_signal(number)
        self._child.wait(20)

    def kill(self) -> None:
        """As `kill -9` does."""
        self.stop(signal.SIGKILL)

    def output(self) -> str:
        return self._log.read_text()


@dataclass
class Federation:
    """Folders and processes."""

    folder: Path
    peers: Peers
    stack: ExitStack
    processes: dict[str, Process] = field(default_factory=dict)

    def start(self, role: str) -> Process:
        """Of "shuffler" or "key-server", again at the address that it had; `federation.toml` of all roles has it."""
        name = role.replace("-", "_")
        peer = getattr(self.peers, name)
        port = peer.url.rpartition(":")[2] if role in self.processes else "0"
        process = Process(self.folder / f"{role}.log", "-m", "ntkfl", "serve", role, self.folder / role, "--port", port)
        self.stack.callback(process.kill)
        self.processes[role] = process
        self.peers = self.peers.model_copy(update={name: peer.model_copy(update={"url": process.url})})
        for file in self.folder.rglob(FILE):
            self.peers.write(file.parent)
        return process

    def kill(self, role: str) -> None:
        """As `kill -9` does."""
        self.processes[role].kill()

    def client(self, name: str) -> Member:
        return Member(self.folder / "clients" / name)

    @property
    def aggregator(self) -> Aggregator:
        return Aggregator(self.folder / "aggregator")


class Member:
    """A client that sends whatever bytes a test gives it."""

    def __init__(self, folder: Path) -> None:
        self.identity = Identity(folder, patience=10)
        self.peers = self.identity.peers
        self.http = HttpClient(self.peers.shuffler.url, folder, self.identity.signs, patience=10)

    def submit(self, signed: bytes, rows: Sequence[bytes], run: str = RUN) -> bytes:
        """Sealed to the key in the announcement; the receipt."""
        head = Head.check(signed, self.peers)
        announced = Announced.of(head.batch.key, signed)
        sealed = seal_rows(rows, bytes.fromhex(head.sealing_key), self.peers.federation, run, announced)
        return self.send(pack_rows(announced, sealed), run)

    def send(self, body: bytes, run: str = RUN) -> bytes:
        return bytes.fromhex(json.loads(self.http.ask("POST", f"/v1/runs/{run}/rows", body))["receipt"])


class Aggregator:
    """One that holds the true keys, and may cheat."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.peers, self.opener = folder, Peers.read(folder), SealingKey.generate()
        self.signer = SigningKey.load(folder / "signing-key.pem")
        self.shuffler = ShufflerClient(folder, self.peers, self.signer, RUN)
        self.shuffler.http.patience = 10

    def head(self, key: BatchKey, message: bytes = b"weights", **changes: Any) -> bytes:
        """A signed announcement; `changes` of the batch or of the head."""
        clients = changes.pop("clients", self.peers.round.clients)
        least = changes.pop("min_clients", self.peers.round.least)
        batch = Batch(key, clients, 1, ROW_BYTES + SEAL_BYTES, least)
        values = {"run": RUN, "terms": TERMS, "message": hashlib.sha256(message).hexdigest()} | changes
        return Head(batch=batch, sealing_key=self.opener.public.hex(), **values).sign(
            self.signer, self.peers.federation
        )


@contextmanager
def federation(folder: Path, clients: int = 3, *, least: int | None = None) -> Iterator[Federation]:
    """Both services running."""
    terms = RoundTerms(clients=clients, least=least or clients, rows=20)
    peers = setup.init(folder / "federation", [f"client-{i}" for i in range(clients)], terms)
    with ExitStack() as stack:
        made = Federation(folder / "federation", peers, stack)
        made.start("key-server")
        made.start("shuffler")
        yield made


def raw(url: str, folder: Path, method: str, path: str, body: bytes = b"", **options: Any) -> httpx.Response:
    """A request by nobody, or with headers of one's own."""
    verify = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    with httpx.Client(base_url=url, verify=verify, trust_env=False, timeout=30) as client:
        return client.request(method, path, content=body or None, **options)


def signed_headers(issued: str, key: SigningKey, method: str, path: str, body: bytes = b"") -> dict[str, str]:
    return {"authorization": sign_request(issued, key, method, path, body)}
