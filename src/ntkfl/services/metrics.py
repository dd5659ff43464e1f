"""Numbers of a process in Prometheus' text format, on a port of their own that is for its operator. They count, and
name nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ntkfl.errors import ConfigError
from ntkfl.services.log import log
from ntkfl.version import __version__

Labels = tuple[tuple[str, str], ...]
COUNTER, GAUGE = "counter", "gauge"
KNOWN: dict[str, tuple[str, str]] = {
    "ntkfl_requests_total": (COUNTER, "requests answered, by service and status"),
    "ntkfl_refusals_total": (COUNTER, "requests refused, by service and reason"),
    "ntkfl_certificate_end_seconds": (GAUGE, "when the role's TLS certificate ends, in seconds since 1970"),
    "ntkfl_batches_total": (COUNTER, "batches that have ended, by state: released or cancelled"),
}


class Metrics:
    """Values by name and labels; thread-safe. A name that is not in `KNOWN` is a mistake: `KeyError`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[Labels, float]] = {}

    def count(self, name: str, amount: float = 1, **labels: object) -> None:
        with self._lock:
            values = self._values.setdefault(name, {})
            values[_labels(labels)] = values.get(_labels(labels), 0) + amount

    def set(self, name: str, value: float, **labels: object) -> None:
        with self._lock:
            self._values.setdefault(name, {})[_labels(labels)] = value

    def text(self) -> str:
        lines = ["# TYPE ntkfl_info gauge", f'ntkfl_info{{version="{__version__}"}} 1']
        with self._lock:
            for name in sorted(self._values):
                kind, says = KNOWN[name]
                lines += [f"# HELP {name} {says}", f"# TYPE {name} {kind}"]
                lines += [
                    f"{name}{_written(labels)} {value:.17g}" for labels, value in sorted(self._values[name].items())
                ]
        return "\n".join(lines) + "\n"


METRICS = Metrics()  # of this process


def _labels(labels: dict[str, object]) -> Labels:
    return tuple(sorted((name, str(value)) for name, value in labels.items()))


def _written(labels: Labels) -> str:
    escaped = ((name, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for name, value in labels)
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}" if labels else ""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = METRICS.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are nobody's news."""


@contextmanager
def serving_metrics(address: str | None) -> Iterator[None]:
    """Serve at "HOST:PORT" while the block runs, over plain HTTP: for this machine, or a network of the operator's own.
    None: not at all.
    """
    if address is None:
        yield
        return
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise ConfigError(f"--metrics takes HOST:PORT, got {address!r}")
    try:
        server = ThreadingHTTPServer((host.strip("[]") or "127.0.0.1", int(port)), _Handler)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}") from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True, name="metrics").start()
    log(f"metrics at http://{server.server_address[0]!s}:{server.server_address[1]}/metrics")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
