"""Listening: certificates, idle connections, a clean stop, and one line where it cannot be done."""

from __future__ import annotations

import ssl
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from ntkfl.errors import ConfigError
from ntkfl.services.http.application import service_app
from ntkfl.services.http.server import Listener, tls_context
from tests.services.example_service import caller, connection
from tests.services.processes import Process


def test_only_holders_of_a_certificate_speak_to_the_second_listener(process: Process, folder: Path) -> None:
    url = process.urls["back"]
    with caller(url, folder, "caller.pem") as trusted:
        assert trusted.get("/health").json()["service"] == "back"
    for certificate in (None, "other.pem", "server.pem"):
        with caller(url, folder, certificate) as stranger, pytest.raises(httpx.TransportError):
            stranger.get("/health")


@pytest.mark.parametrize("begun", [b"", b"GET /hea"])
@pytest.mark.parametrize("after_a_request", [False, True])
def test_a_connection_that_asks_nothing_is_closed(
    process: Process, folder: Path, begun: bytes, after_a_request: bool
) -> None:
    with connection(process.urls["front"], folder) as raw:
        if after_a_request:
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += raw.recv(1000)
            assert answer.startswith(b"HTTP/1.1 200")
        if begun:
            raw.sendall(begun)
        start = time.monotonic()
        assert raw.recv(1000) == b""
        assert time.monotonic() - start < 5


def listener(folder: Path, **changes: object) -> Listener:
    values = {"host": "127.0.0.1", "port": 0, "cert": folder / "tls.pem", "key": folder / "key.pem"}
    return Listener(service_app("test", max_body=10), **(values | changes))  # type: ignore[arg-type]


def test_tls_is_new_enough(folder: Path) -> None:
    assert tls_context(listener(folder)).minimum_version == ssl.TLSVersion.TLSv1_2
    assert tls_context(listener(folder)).verify_mode == ssl.CERT_NONE
    assert tls_context(listener(folder, client_ca=folder / "callers.pem")).verify_mode == ssl.CERT_REQUIRED


def test_a_key_that_others_can_read_is_refused(folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_bytes((folder / "key.pem").read_bytes())
    key.chmod(0o604)
    with pytest.raises(ConfigError, match=r"key\.pem holds a secret and others can read it: chmod 600"):
        tls_context(replace(listener(folder), key=key))
    key.chmod(0o400)
    tls_context(replace(listener(folder), key=key))
