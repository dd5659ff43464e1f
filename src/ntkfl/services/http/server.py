"""Serving applications over TLS: one process and one event loop, however many listeners, and a clean stop.

Connections are limited. One that asks nothing, or does not finish its handshake, is closed after a while. At the limit
the connection that has been idle longest is closed for the next one; where all are at work, the next is refused with
503 and told when to retry. So a flood of connections costs working clients no more than a delay.
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ntkfl.atomic import check_private
from ntkfl.errors import ConfigError
from ntkfl.extras import missing
from ntkfl.services.http.refusals import error_response
from ntkfl.services.log import log

try:
    import uvicorn
    from fastapi import FastAPI
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:  # the core works without; this room does not
    raise missing("a service", "services") from error

HEADERS_S = 15  # for a TLS handshake, for a request's headers, and for an idle connection
_SHUTDOWN_S = 5  # for a connection that is being closed to take the rest of its answer
STOP_S = 10  # for requests under way to end once a stop is asked for
_BACKLOG = 512
_REFUSED = 128  # connections beyond the limit that get a 503; more are cut
_OWN_FILES = 128  # that a service has open besides connections
_BUFFER = 64 << 10  # bytes that wait in memory for one reader, and that one read takes
_SYSTEM_BUFFER = 256 << 10  # bytes that wait in the system's memory for one reader; left to itself it takes 4 MB


@dataclass(frozen=True)
class Listener:
    """An application at an address. With `client_ca`, only holders of a certificate of that authority can connect."""

    app: FastAPI
    host: str
    port: int  # 0: any that is free
    cert: Path
    key: Path
    client_ca: Path | None = None
    connections: int = 512  # at once, or fewer where the system allows fewer files; more get a 503


def serve(listeners: Sequence[Listener], stop: threading.Event | None = None) -> str | None:
    """Serve all listeners in this process until SIGTERM, SIGINT or `stop`; then let requests under way end. The name of
    the signal, where it was one.

    Prints `listening https://HOST:PORT service=NAME`, a line per listener, once all of them answer.
    """
    contexts = [tls_context(listener) for listener in listeners]
    sslproto.SSLProtocol.max_size = _BUFFER  # asyncio's own are 256 KiB a connection, a gigabyte for 4,096 that wait
    share = _allow_files(sum(listener.connections for listener in listeners))
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_bind(listener)) for listener in listeners]
        servers = [_server(listener, context, share) for listener, context in zip(listeners, contexts, strict=True)]
        runner = stack.enter_context(asyncio.Runner(loop_factory=_EventLoop))
        return runner.run(_run(listeners, servers, sockets, stop or threading.Event()))


async def _run(
    listeners: Sequence[Listener], servers: list[_Server], sockets: list[socket.socket], stop: threading.Event
) -> str | None:
    by: list[str] = []

    def stop_now(number: signal.Signals) -> None:
        by.append(number.name)
        for server in servers:
            server.force_exit = stop.is_set()  # the second time: wait for nobody
        stop.set()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop_now, number)
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
    name = by[0] if by else None
    log("stopped", by=name or "its caller")
    return name


class _EventLoop(asyncio.SelectorEventLoop):
    """uvicorn has no setting for TLS handshakes, to which asyncio gives a minute and a closing half of one: for so long
    a connection that says nothing would hold a file.
    """

    async def create_server(self, *arguments: Any, **options: Any) -> asyncio.Server:
        options |= {"ssl_handshake_timeout": HEADERS_S, "ssl_shutdown_timeout": _SHUTDOWN_S}
        return await super().create_server(*arguments, **options)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for all servers of the process: `_run` takes them."""
        yield


@dataclass
class _Connections:
    """Of one listener: how many there may be, and which of them ask nothing at the moment, the longest idle first."""

    limit: int
    public: bool  # anybody can connect
    idle: dict[_Protocol, None] = field(default_factory=dict)


class _Protocol(H11Protocol):
    """uvicorn's, with the three bounds that it lacks.

    It waits for a request's headers without end: `timeout_keep_alive` ends with the first byte. At its
    `limit_concurrency` every request is refused, those of connections at work too, so that a flood of idle connections
    would shut out everybody: here the longest idle one makes room. It leaves what waits for a slow reader to defaults
    that are megabytes per connection.
    """

    def __init__(self, own: _Connections, **options: Any) -> None:
        super().__init__(**options)
        self._own = own

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_BUFFER)
        if self._own.public:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SYSTEM_BUFFER)
        self.loop.call_later(HEADERS_S, self._close_if_idle, None)
        over = len(self.connections) - self._own.limit
        if over > 0 and self._own.idle:
            oldest = next(iter(self._own.idle))
            del self._own.idle[oldest]
            oldest.transport.abort()
        elif over > _REFUSED:
            transport.abort()
        elif over > 0:
            self.app = _BUSY
        self._own.idle[self] = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:
            self._own.idle.pop(self, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._own.idle.pop(self, None)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        done = self.cycle  # the next may begin at once, where it was sent ahead
        super().on_response_complete()
        self.loop.call_later(HEADERS_S, self._close_if_idle, done)
        if self.cycle is done and self in self.connections:
            self._own.idle[self] = None

    def shutdown(self) -> None:
        """A peer that keeps an idle connection and does not answer its closing must not hold up a stop."""
        super().shutdown()
        self.loop.call_later(1, self._abort_if_done)

    def _abort_if_done(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    def _close_if_idle(self, last: object) -> None:
        if self.cycle is last and not self.transport.is_closing():
            self.transport.close()


_BUSY = error_response(503, "busy", "too many connections; try again soon", {"connection": "close"})


def _server(listener: Listener, context: ssl.SSLContext, share: float) -> _Server:
    own = _Connections(max(1, int(share * listener.connections)), public=listener.client_ca is None)
    config = uvicorn.Config(
        listener.app,
        http=partial(_Protocol, own),  # type: ignore[arg-type]  # any callable that makes a protocol
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=HEADERS_S,
        timeout_graceful_shutdown=STOP_S,
        ssl_context_factory=lambda *_: context,
    )
    return _Server(config)


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
        return socket.create_server((listener.host, listener.port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "no such address"
        raise ConfigError(f"cannot listen on {listener.host}:{listener.port}: {why}") from None


def _allow_files(connections: int) -> float:
    """Ask the system for a file a connection (most give a process 1,024 unless it asks): the share of them it allows.

    Without files for itself a service could not answer those whose connections it has.
    """
    want = connections + _REFUSED + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < want:
        soft = want if hard == resource.RLIM_INFINITY else min(want, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= want:
        return 1.0
    return max(0, soft - _OWN_FILES) / (connections + _REFUSED)
