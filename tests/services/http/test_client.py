"""A service that answers too much: its caller reads no more than the question allows."""

from __future__ import annotations

import asyncio
import gzip
import logging
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from ntkfl.crypto.row_frames import FRAME_BYTES
from ntkfl.errors import MessageError
from ntkfl.services.http.client import ANNOUNCED, SMALL, HttpClient
from ntkfl.services.shuffler.client import ShufflerClient
from ntkfl.services.shuffler.revocations import Revocations
from ntkfl.services.shuffler.schemas import MAX_BODY
from tests.deployment.federation import Deployment
from tests.services.example_service import make

ENDLESS = 1 << 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("client"))


def test_a_service_that_is_not_there_is_said_at_once_and_when_it_is_back(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line when nobody answers, though it tries many times, and one when somebody does."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    client = HttpClient(f"https://127.0.0.1:{port}", folder / "ca.pem", patience=20)
    monkeypatch.setattr(logging.getLogger("ntkfl.services"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("ntkfl.services"), "handlers", [])  # another test may have left one
    caplog.set_level(logging.INFO, "ntkfl.services")
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(client.ask("GET", "/x").status_code))
    asking.start()
    while not caplog.messages:
        asking.join(0.02)
    assert re.fullmatch(
        rf"{client.url} cannot be reached \(.*refused\); tries again, 20 s more at most", caplog.messages[0]
    )
    asking.join(0.5)
    assert len(caplog.messages) == 1
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 2"
    with closing(Talker(folder, head, b"{}", port=port)):
        asking.join(10)
    assert answers == [200]
    assert caplog.messages[1:] == [f"{client.url} answers again"]


class Talker:
    """Answers every request with `head` and then with bytes until its caller hangs up, or `size` of them."""

    def __init__(
        self,
        folder: Path,
        head: bytes,
        body: bytes | int,
        files: tuple[str, str] = ("tls.pem", "key.pem"),
        port: int = 0,
    ):
        self.sent = 0
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*(folder / name for name in files))
        self._listener = socket.create_server(("127.0.0.1", port))
        self._context, self._head, self._body = context, head, body
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                raw, _ = self._listener.accept()
                with suppress(OSError), self._context.wrap_socket(raw, server_side=True) as connection:
                    connection.recv(1 << 16)
                    connection.sendall(self._head + b"\r\n\r\n")
                    if isinstance(self._body, bytes):
                        connection.sendall(self._body)
                    else:
                        while self.sent < self._body:
                            connection.sendall(bytes(1 << 16))
                            self.sent += 1 << 16

    def close(self) -> None:
        self._listener.close()


@contextmanager
def talking(folder: Path, head: str, body: bytes | int, **files: tuple[str, str]) -> Iterator[Talker]:
    with closing(Talker(folder, head.replace("\n", "\r\n").encode(), body, **files)) as talker:
        yield talker


@pytest.mark.parametrize(
    "head", ["HTTP/1.1 200 OK", "HTTP/1.1 200 OK\ncontent-length: 1099511627776", "HTTP/1.1 403 No"]
)
def test_an_endless_answer_is_cut_off(folder: Path, head: str) -> None:
    with talking(folder, head, ENDLESS) as talker:
        client = HttpClient(talker.url, folder / "ca.pem", patience=1)
        with pytest.raises(MessageError, match=f"more than the {SMALL} bytes"):
            client.ask("GET", "/x")
        client.close()
        assert talker.sent < 64 << 20  # what was on its way, in the buffers of both


def test_a_packed_answer_is_refused_before_it_is_unpacked(folder: Path) -> None:
    """A megabyte of zeros in a thousand bytes."""
    packed = gzip.compress(bytes(1 << 20))
    head = f"HTTP/1.1 200 OK\ncontent-encoding: gzip\ncontent-length: {len(packed)}"
    with talking(folder, head, packed) as talker, pytest.raises(MessageError, match="packed bytes"):
        HttpClient(talker.url, folder / "ca.pem", patience=1).ask("GET", "/x")


def test_an_answer_of_just_the_size_is_read(folder: Path) -> None:
    with talking(folder, f"HTTP/1.1 200 OK\ncontent-length: {SMALL}", b"7" * SMALL) as talker:
        assert HttpClient(talker.url, folder / "ca.pem", patience=1).ask("GET", "/x").content == b"7" * SMALL


def test_an_announcement_may_have_what_the_shuffler_takes() -> None:
    assert ANNOUNCED == MAX_BODY


def test_released_rows_are_bounded_by_what_was_asked_for(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    own = deployment.folder / "shuffler"
    with talking(own, "HTTP/1.1 200 OK", ENDLESS, files=("tls.pem", "tls-key.pem")) as talker:
        peers = deployment.peers.model_copy(
            update={"shuffler": deployment.peers.shuffler.model_copy(update={"aggregator_url": talker.url})}
        )
        client = ShufflerClient(peers, deployment.folder / "aggregator")
        client.http.patience = 0
        deployment.urls = {"shuffler-aggregator": talker.url}
        batch = deployment.batch("ada", "bob", max_rows=1000, row_bytes=500)
        with suppress(MessageError):  # the answer to this one is endless too
            client.publish(deployment.aggregator().signed(batch))
        most = FRAME_BYTES + 2 * 1000 * 500
        with pytest.raises(MessageError, match=f"more than the {most} bytes"):
            client.release(deployment.announced[batch.key])
        deployment.hang_up()


def test_an_endless_list_of_revoked_clients_changes_nothing(
    folder: Path,
) -> None:
    seen: list[object] = []
    peers = SimpleNamespace(key_server=SimpleNamespace(url="", signing_key="00" * 32), federation="f")
    keeper = SimpleNamespace(set_revoked=lambda *given: seen.append(given))
    with talking(folder, "HTTP/1.1 200 OK", 1 << 30) as talker:
        peers.key_server.url = talker.url
        revocations = Revocations(keeper, peers, folder / "ca.pem")  # type: ignore[arg-type]
        asyncio.run(revocations.refresh())
        assert talker.sent < 128 << 20
    assert not seen
    assert revocations._failing
