"""Listening: certificates, idle connections, a clean stop, and one line where it cannot be done."""

from __future__ import annotations

import json
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from ntkfl.crypto.context import Secret
from ntkfl.errors import ConfigError
from ntkfl.services.http.application import service_app
from ntkfl.services.http.server import Listener, serve, tls_context
from ntkfl.services.log import configure_logging, log, warn
from tests.services.example_service import caller, connection, make, start
from tests.services.processes import Process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("listen"))


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[Process]:
    with start(folder) as process:
        yield process


@pytest.fixture
def logging_to() -> Iterator[StringIO]:
    """What this process's services log."""
    stream = StringIO()
    before = {name: logging.getLogger(name).handlers for name in ("ntkfl.services", "uvicorn", "asyncio")}
    configure_logging("test", stream)
    yield stream
    for name, handlers in before.items():
        logging.getLogger(name).handlers = handlers


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


def test_a_connection_that_does_not_finish_its_handshake_is_closed(process: Process) -> None:
    address = httpx.URL(process.urls["front"])
    with socket.create_connection((address.host, address.port), 10) as raw:
        start = time.monotonic()
        assert raw.recv(1000) == b""
        assert time.monotonic() - start < 5  # asyncio alone waits for a minute


def test_two_lines_say_where_it_listens_and_nothing_else_is_printed(process: Process) -> None:
    assert [re.sub(r":\d+ ", ":PORT ", line) for line in process.out] == [
        "listening https://127.0.0.1:PORT service=front",
        "listening https://127.0.0.1:PORT service=back",
    ]


def test_a_stop_lets_requests_end_but_not_for_ever(folder: Path) -> None:
    with (
        start(folder) as process,
        caller(process.urls["front"], folder) as client,
        ThreadPoolExecutor() as pool,
    ):
        short = pool.submit(client.get, "/slow", params={"seconds": 1})
        long = pool.submit(client.get, "/slow", params={"seconds": 60})
        time.sleep(0.5)
        asked = time.monotonic()
        assert process.stop() == 0
        assert time.monotonic() - asked < 10
        assert short.result(5).json() == "done"
        assert long.exception(5) is not None or long.result().status_code == 500
    assert json.loads(process.err[-1])["event"] == "stopped"
    assert "Traceback" not in process.output()


def test_an_idle_connection_does_not_hold_up_a_stop(folder: Path) -> None:
    """One that was used and is kept open, by a peer that does not answer its closing."""
    with start(folder) as process, caller(process.urls["front"], folder) as kept:
        assert kept.get("/health").status_code == 200
        assert process.stop(timeout=5) == 0  # the bound is 10 s; a kept connection used to take all of it


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


def test_what_cannot_be_served_is_one_line(folder: Path) -> None:
    in_use = pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1:\d+: Address already in use")
    with socket.create_server(("127.0.0.1", 0)) as taken, in_use:
        serve([listener(folder), listener(folder, port=taken.getsockname()[1])])
    for changes, message in (
        ({"host": "no.such.host.invalid"}, "cannot listen on no.such.host.invalid"),
        ({"port": 99999}, "cannot listen on 127.0.0.1:99999"),
        ({"cert": folder / "absent.pem"}, "no certificate and key"),
        ({"key": folder / "program.py"}, "no certificate and key"),
        ({"key": folder / "caller.pem"}, "no certificate and key"),
        ({"client_ca": folder / "program.py"}, "no certificate authority"),
    ):
        with pytest.raises(ConfigError, match=message):
            serve([listener(folder, **changes)])


def test_a_thread_can_serve_and_be_stopped(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=serve, args=([listener(folder)], stop), daemon=True)
    thread.start()
    printed = ""
    for _ in range(100):
        printed += capfd.readouterr().out
        if "listening" in printed:
            break
        time.sleep(0.05)
    with caller(printed.split()[1], folder) as client:
        assert client.get("/health").status_code == 200
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


def test_a_service_that_cannot_begin_says_so_without_details(
    folder: Path, capfd: pytest.CaptureFixture[str], logging_to: StringIO
) -> None:
    @asynccontextmanager
    async def failing(_: FastAPI) -> AsyncIterator[None]:
        raise ValueError("hidden-detail")
        yield

    app = service_app("test", max_body=10, lifespan=failing)
    with pytest.raises(ConfigError, match="ended by itself"):
        serve([replace(listener(folder), app=app)])
    lines = list(map(json.loads, logging_to.getvalue().splitlines()))
    assert "ValueError" in [line.get("error") for line in lines]
    assert "hidden-detail" not in logging_to.getvalue() + "".join(capfd.readouterr())
    assert "listening" not in capfd.readouterr().out


def test_both_forms_of_the_log_say_the_same_and_requests_are_debug(logging_to: StringIO) -> None:
    logger = logging.getLogger("ntkfl.services")
    for form in ("json", "plain"):
        configure_logging("test", logging_to, form=form)
        log("request", level=logging.DEBUG)
        log("round 1: released", clients=3, service="shuffler", secret=Secret(b"value"))
        warn("nobody answers")
    as_json, problem, plain, plain_problem = logging_to.getvalue().splitlines()
    said = json.loads(as_json)
    assert (said["event"], said["service"], said["clients"]) == ("round 1: released", "shuffler", 3)
    assert json.loads(problem)["level"] == "warning"
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ"
    assert re.fullmatch(rf'{when} shuffler: round 1: released clients=3 secret="<Secret>"', plain)
    assert re.fullmatch(rf"{when} test: warning: nobody answers", plain_problem)
    configure_logging("test", logging_to, level="debug")
    log("request", level=logging.DEBUG)
    assert '"request"' in logging_to.getvalue()
    logger.setLevel(logging.INFO)


def test_log_fields_that_are_no_names_or_numbers_do_not_show(logging_to: StringIO) -> None:
    log("event", secret=Secret(b"value"), raw=b"value", number=1)
    line = json.loads(logging_to.getvalue())
    assert (line["secret"], line["raw"], line["number"]) == ("<Secret>", "<bytes>", 1)
    assert line["service"] == "test"
