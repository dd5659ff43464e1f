"""Serving applications over TLS: one process and one event loop, however many listeners, and a clean stop.

Connections are a limited good. One that asks nothing, or does not finish its handshake, is closed after a while; where
all are taken, the one that has been silent longest makes room for the next, and where all are at work the next is told
when to come back. So a flood of connections costs those who ask something no more than a delay.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import ssl
import threading
from asyncio import sslproto
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ntkfl.atomic import check_private
from ntkfl.errors import ConfigError
from ntkfl.services.heap import keep_heaps_small
from ntkfl.services.log import log

try:
    import uvicorn
    from fastapi import FastAPI
    from starlette.responses import JSONResponse
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:  # the core works without; this room does not
    raise ConfigError("services need the extra 'services': pip install 'ntkfl[services]'") from error

HEADERS_S = 15  # for a connection to shake hands, to say what it wants, and to stay without asking for more
_SHUTDOWN_S = 5  # for a connection that is being closed to take what was on its way
STOP_S = 10  # for requests under way to end once a stop is asked for
RETRY_AFTER_S = 1  # until who is turned away for now may ask again
_BACKLOG = 512
_TURNED_AWAY = 128  # connections beyond the limit that are told so; more are cut
_OWN_FILES = 128  # that a service has open besides connections
_BUFFER = 64 << 10  # bytes that wait in memory for one reader, and that one read takes
_SYSTEM_BUFFER = 256 << 10  # bytes that wait in the system's memory for one reader; left to itself it takes 4 MB


@dataclass(frozen=True)
class Listener:
    """An application at an address. With `client_ca`, only who holds a certificate of that authority gets to speak."""

    app: FastAPI
    host: str
    port: int  # 0: any that is free
    cert: Path
    key: Path
    client_ca: Path | None = None
    connections: int = 512  # at work at once, or fewer where the system allows fewer files; more are told 503


def serve(listeners: Sequence[Listener], stop: threading.Event | None = None) -> None:
    """Serve all listeners in this process until SIGTERM, SIGINT or `stop`; then let requests under way end.

    Prints `listening https://HOST:PORT service=NAME`, a line a listener, once all of them answer.
    """
    keep_heaps_small()
    contexts = [_tls(listener) for listener in listeners]
    sslproto.SSLProtocol.max_size = _BUFFER  # asyncio's own are 256 KiB a connection, a gigabyte for 4,096 that wait
    share = _allow_files(sum(listener.connections for listener in listeners))
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_bind(listener)) for listener in listeners]
        servers = [
            _Server(_config(listener, context), max(1, int(share * listener.connections)), listener.client_ca is None)
            for listener, context in zip(listeners, contexts, strict=True)
        ]
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
    def __init__(self, config: uvicorn.Config, connections: int, for_anybody: bool) -> None:
        super().__init__(config)
        self._connections, self._for_anybody = connections, for_anybody
        self._silent: dict[_Protocol, None] = {}  # those that ask nothing at the moment, the longest silent first

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, with a bound on handshakes and a protocol that knows how many others there are."""
        await self.lifespan.startup()
        self.should_exit = self.lifespan.should_exit
        if self.should_exit:
            return

        def protocol() -> _Protocol:
            made = _Protocol(self.config, self.server_state, self.lifespan.state)
            made.most, made.silent, made.for_anybody = self._connections, self._silent, self._for_anybody
            return made

        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                protocol,
                sock=sock,
                ssl=self.config.ssl,
                backlog=_BACKLOG,
                ssl_handshake_timeout=HEADERS_S,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
            for sock in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for all servers of the process: `_run` takes them."""
        yield


class _Protocol(H11Protocol):
    """uvicorn's, which waits for ever for a request's headers, made to give up, and to make room where it is scarce."""

    most: int
    silent: dict[_Protocol, None]
    for_anybody: bool

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_BUFFER)
        if self.for_anybody:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SYSTEM_BUFFER)
        self.loop.call_later(HEADERS_S, self._give_up, None)
        over = len(self.connections) - self.most
        if over > 0 and self.silent:
            oldest = next(iter(self.silent))
            del self.silent[oldest]
            oldest.transport.abort()
        elif over > _TURNED_AWAY:
            transport.abort()
        elif over > 0:
            self.app = _come_back
        self.silent[self] = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:
            self.silent.pop(self, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.silent.pop(self, None)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        done = self.cycle  # the next may begin at once, where it was sent ahead
        super().on_response_complete()
        self.loop.call_later(HEADERS_S, self._give_up, done)
        if self.cycle is done and self in self.connections:
            self.silent[self] = None

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


_come_back = JSONResponse(
    {"error": "busy", "message": "too many connections; try again soon"},
    503,
    {"retry-after": str(RETRY_AFTER_S), "connection": "close"},
)


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
        return socket.create_server((listener.host, listener.port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "no such address"
        raise ConfigError(f"cannot listen on {listener.host}:{listener.port}: {why}") from None


def _allow_files(connections: int) -> float:
    """Ask the system for a file a connection (most give a process 1,024 unless it asks): the share of them it allows.

    Without files for itself a service could not answer those whose connections it has.
    """
    want = connections + _TURNED_AWAY + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < want:
        soft = want if hard == resource.RLIM_INFINITY else min(want, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= want:
        return 1.0
    return max(0, soft - _OWN_FILES) / (connections + _TURNED_AWAY)
