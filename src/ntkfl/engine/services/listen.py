"""Serving applications over TLS: one process and one event loop, however many listeners, and a clean stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ntkfl.engine.services.log import log
from ntkfl.errors import ConfigError

try:
    import uvicorn
    from fastapi import FastAPI
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:  # the core works without; this room does not
    raise ConfigError("services need the extra 'services': pip install 'ntkfl[services]'") from error

HEADERS_S = 15  # for a connection to say what it wants, and to stay without asking for more
STOP_S = 10  # for requests under way to end once a stop is asked for
_BACKLOG = 512


@dataclass(frozen=True)
class Listener:
    """An application at an address. With `client_ca`, only who holds a certificate of that authority gets to speak."""

    app: FastAPI
    host: str
    port: int  # 0: any that is free
    cert: Path
    key: Path
    client_ca: Path | None = None
    connections: int = 512  # open at once; more are told 503


def serve(listeners: Sequence[Listener], stop: threading.Event | None = None) -> None:
    """Serve all listeners in this process until SIGTERM, SIGINT or `stop`; then let requests under way end.

    Prints `listening https://HOST:PORT service=NAME`, a line a listener, once all of them answer.
    """
    contexts = [_tls(listener) for listener in listeners]
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_bind(listener)) for listener in listeners]
        servers = [_Server(_config(*pair)) for pair in zip(listeners, contexts, strict=True)]
        asyncio.run(_run(listeners, servers, sockets, stop or threading.Event()))


async def _run(
    listeners: Sequence[Listener], servers: list[_Server], sockets: list[socket.socket], stop: threading.Event
) -> None:
    def stop_now() -> None:
        for server in servers:
            server.force_exit = stop.is_set()  # asked a second time: wait for nobody
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
    """uvicorn's, which waits for ever for a request's headers, made to give up: idle connections are a limited good."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEADERS_S, self._give_up, None)

    def on_response_complete(self) -> None:
        done = self.cycle  # the next may begin at once, where it was sent ahead
        super().on_response_complete()
        self.loop.call_later(HEADERS_S, self._give_up, done)

    def shutdown(self) -> None:
        super().shutdown()
        self.loop.call_later(1, self._cut)

    def _cut(self) -> None:
        """A peer that keeps an idle connection and does not answer its closing would hold up a stop for long."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    def _give_up(self, last: object) -> None:
        if self.cycle is last and not self.transport.is_closing():
            self.transport.close()


def _config(listener: Listener, context: ssl.SSLContext) -> uvicorn.Config:
    config = uvicorn.Config(
        listener.app,
        http=_Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=listener.connections,
        backlog=_BACKLOG,
        timeout_keep_alive=HEADERS_S,
        timeout_graceful_shutdown=STOP_S,
    )
    config.load()
    config.ssl = context
    return config


def _tls(listener: Listener) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(listener.cert, listener.key, password=lambda: "")  # never ask at the terminal
    except (OSError, ValueError):
        raise ConfigError(f"no certificate and key to serve with in {listener.cert} and {listener.key}") from None
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
        return socket.create_server((listener.host, listener.port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "no such address"
        raise ConfigError(f"cannot listen on {listener.host}:{listener.port}: {why}") from None
