"""Serving applications over TLS: one process and one event loop, however many listeners, and a clean stop."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ntkfl.atomic import check_private
from ntkfl.errors import ConfigError
from ntkfl.extras import missing
from ntkfl.services.log import log

try:
    import uvicorn
    from fastapi import FastAPI
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:  # the core works without; this room does not
    raise missing("a service", "services") from error

HEADERS_S = 15  # for a request's headers, and for an idle connection
STOP_S = 10  # for requests under way to end once a stop is asked for


@dataclass(frozen=True)
class Listener:
    """An application at an address. With `client_ca`, only holders of a certificate of that authority can connect."""

    app: FastAPI
    host: str
    port: int  # 0: any that is free
    cert: Path
    key: Path
    client_ca: Path | None = None
    connections: int = 512  # at once; while there are as many, requests get a 503


def serve(listeners: Sequence[Listener], stop: threading.Event | None = None) -> None:
    """Serve all listeners in this process until SIGTERM, SIGINT or `stop`; then let requests under way end.

    Prints `listening https://HOST:PORT service=NAME`, a line per listener, once all of them answer.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # most systems give 1,024 to those that do not ask
    with contextlib.ExitStack() as stack:
        servers = [_server(listener) for listener in listeners]
        sockets = [stack.enter_context(_bind(listener)) for listener in listeners]
        runner = stack.enter_context(asyncio.Runner(loop_factory=asyncio.SelectorEventLoop))
        runner.run(_run(listeners, servers, sockets, stop or threading.Event()))


async def _run(
    listeners: Sequence[Listener], servers: list[_Server], sockets: list[socket.socket], stop: threading.Event
) -> None:
    def stop_now() -> None:
        for server in servers:
            server.force_exit = stop.is_set()  # the second time: wait for nobody
        stop.set()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop_now)
    addresses = [sock.getsockname() for sock in sockets]
    tasks = [asyncio.create_task(server.serve([sock])) for server, sock in zip(servers, sockets, strict=True)]
    while not (all(server.started for server in servers) or any(task.done() for task in tasks)):
        await asyncio.sleep(0.01)
    if not any(task.done() for task in tasks):
        for listener, address in zip(listeners, addresses, strict=True):
            host = f"[{listener.host}]" if ":" in listener.host else listener.host
            print(f"listening https://{host}:{address[1]} service={listener.app.title}", flush=True)
        while not (stop.is_set() or any(task.done() for task in tasks)):
            await asyncio.sleep(0.05)
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*tasks)
    if not stop.is_set():
        raise ConfigError("the service ended by itself; its log says why")
    log("stopped")


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for all servers of the process: `_run` takes them."""
        yield


class _Protocol(H11Protocol):
    """uvicorn's `timeout_keep_alive` begins with an answer and ends with the next byte: here a connection whose next
    request is not there in time is closed, however many bytes of it have come.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEADERS_S, self._close_if_idle, None)

    def on_response_complete(self) -> None:
        done = self.cycle  # the next may begin at once, where it was sent ahead
        super().on_response_complete()
        self.loop.call_later(HEADERS_S, self._close_if_idle, done)

    def _close_if_idle(self, last: object) -> None:
        if self.cycle is last and not self.transport.is_closing():
            self.transport.close()


def _server(listener: Listener) -> _Server:
    context = tls_context(listener)
    return _Server(
        uvicorn.Config(
            listener.app,
            http=_Protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=listener.connections,
            timeout_graceful_shutdown=STOP_S,
            ssl_context_factory=lambda *_: context,
        )
    )


def tls_context(listener: Listener) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(listener.cert, listener.key, password=lambda: "")  # never ask at the terminal
    except (OSError, ValueError):
        raise ConfigError(f"no certificate and key to serve with in {listener.cert} and {listener.key}") from None
    check_private(listener.key)
    if listener.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(listener.client_ca)
        except OSError:
            raise ConfigError(f"no certificate authority in {listener.client_ca}") from None
    return context


def _bind(listener: Listener) -> socket.socket:
    try:
        family = socket.getaddrinfo(listener.host, listener.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((listener.host, listener.port), family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "no such address"
        raise ConfigError(f"cannot listen on {listener.host}:{listener.port}: {why}") from None
