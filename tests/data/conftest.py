"""A web server that misbehaves on demand, a machine without data, and the real data where there is any."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from ntkfl.data import catalog, published
from ntkfl.data.catalog import Remote


@dataclass
class Host:
    """What the server serves, how it misbehaves, and what it was asked for."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)  # bytes after which each next answer breaks off
    statuses: list[int] = field(default_factory=list)  # error codes of the next answers
    requests: list[str] = field(default_factory=list)

    def publish(self, name: str, content: bytes) -> Remote:
        self.files[name] = content
        return Remote(f"{self.url}/{name}", len(content), hashlib.sha256(content).hexdigest())


def _answer(host: Host, handler: BaseHTTPRequestHandler) -> None:
    name = handler.path.lstrip("/")
    host.requests.append(name)
    if host.statuses:
        return handler.send_error(host.statuses.pop(0))
    body = host.files[name]
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[: host.cuts.pop(0) if host.cuts else len(body)])
    handler.close_connection = True
    return None


@pytest.fixture
def host() -> Iterator[Host]:
    """A real server on 127.0.0.1."""
    host = Host()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(host, self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    host.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield host
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without data: own cache, no NTKFL_DATA, an empty system folder; returns the folder they live in."""
    monkeypatch.delenv("NTKFL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(catalog, "SYSTEM_FOLDERS", (tmp_path / "system",))
    return tmp_path


def idx_bytes(array: np.ndarray) -> bytes:
    """The idx file of a uint8 array."""
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


@dataclass
class Tiny:
    """A stand-in for mnist with 12 training and 4 test rows: the content of its four files by name."""

    contents: dict[str, bytes]
    host: Host

    def put(self, folder: Path, compress: Callable[[bytes], bytes] | None = gzip.compress) -> Path:
        """Write the four files into `folder`, compressed or as they are."""
        folder.mkdir(parents=True)
        for name, content in self.contents.items():
            path = folder / (name if compress is None else f"{name}.gz")
            path.write_bytes(content if compress is None else compress(content))
        return folder


@pytest.fixture
def tiny(bare: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """mnist replaced by a tiny one, downloadable from `host`, on a machine without data."""
    rng = np.random.default_rng(0)
    images, test_images = (rng.integers(0, 256, (n, 28, 28), np.uint8) for n in (12, 4))
    arrays = (images, (np.arange(12) % 10).astype(np.uint8), test_images, np.arange(4, dtype=np.uint8))
    contents = {name: idx_bytes(array) for name, array in zip(published.IDX, arrays, strict=True)}
    sums = [hashlib.sha256(content).hexdigest() for content in contents.values()]
    entry = replace(
        catalog.CATALOG["mnist"],
        read=partial(published.read_idx, sha256=sums),
        downloads=tuple(host.publish(f"{name}.gz", gzip.compress(content)) for name, content in contents.items()),
    )
    monkeypatch.setitem(catalog.CATALOG, "mnist", entry)
    return Tiny(contents, host)
