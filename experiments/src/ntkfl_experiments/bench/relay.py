"""Bytes on their way between processes, counted: a relay that passes on what it gets."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Relay:
    """Listens on loopback and passes every connection on to `port` there. `up` and `down`: bytes to it and from it."""

    def __init__(self, port: int) -> None:
        self._target, self.up, self.down = port, 0, 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                called = socket.create_connection(("127.0.0.1", self._target))
                for pair, name in (((caller, called), "up"), ((called, caller), "down")):
                    threading.Thread(target=self._pass, args=(*pair, name), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, name: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
                with self._lock:
                    setattr(self, name, getattr(self, name) + len(data))
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
