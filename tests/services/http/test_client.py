"""A service that answers too much: its caller reads no more than the question allows."""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from ntkfl.errors import MessageError
from ntkfl.services.http.client import SMALL, HttpClient
from ntkfl.services.shuffler.revocations import Revocations

ENDLESS = 1 << 40


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
