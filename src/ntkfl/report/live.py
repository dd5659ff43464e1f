"""The page while runs go on: a small server for this machine that reads run folders and writes nothing.

    /               the page, without runs
    /events         the runs, then those that changed, as server-sent events
    /files/ID/NAME  one of a run's own files, by names from a fixed list

What is asked for is looked up by id and name in what was found; no path is ever made out of an address.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ntkfl.errors import ConfigError, NTKFLError
from ntkfl.report.page import render, title
from ntkfl.report.runs import FoundRun, find
from ntkfl.report.view import files, view
from ntkfl.safe_parse import read_unlinked
from ntkfl.version import __version__

_KINDS = {".toml": "text/plain", ".jsonl": "text/plain"}


def _mark(run: FoundRun) -> tuple[object, ...]:
    """What changes whenever the run's view does: sizes and times of its files, and whether a process holds it."""
    states: list[tuple[str, int, int]] = []
    with suppress(OSError):  # not begun, or just being moved
        for path in run.folder.path.iterdir():
            states.append((path.name, path.lstat().st_mtime_ns, path.lstat().st_size))
    return run.name, run.rounds, run.stop_at, run.folder.in_use, *sorted(states)


class Handler(BaseHTTPRequestHandler):
    """Answers one request from what `LiveServer.look` found."""

    server: LiveServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = f"ntkfl/{__version__}", ""

    def do_GET(self) -> None:
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            parts = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]
        except ValueError:  # half an address in brackets
            return self._answer(HTTPStatus.BAD_REQUEST, b"this is no address\n")
        # A page elsewhere whose name resolves to this machine cannot read runs through a browser here.
        if host not in ("localhost", "127.0.0.1"):
            return self._answer(HTTPStatus.FORBIDDEN, b"this server answers to its own address only\n")
        runs = self.server.look() or {}
        match parts:
            case [""]:
                page = render(title(self.server.paths), [], live=True)
                return self._answer(HTTPStatus.OK, page.encode(), "text/html")
            case ["events"]:
                return self._events()
            case ["files", id, name] if id in runs and (path := files(runs[id]).get(name)):
                with suppress(OSError):  # gone, or a link by now
                    kind = _KINDS.get(path.suffix, "application/octet-stream")
                    return self._answer(HTTPStatus.OK, read_unlinked(path), kind)
        self._answer(HTTPStatus.NOT_FOUND, b"there is nothing here\n")

    def _head(self, status: HTTPStatus, kind: str, length: int | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8" if kind.startswith("text/") else kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()

    def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain") -> None:
        self._head(status, kind, len(body))
        self.wfile.write(body)

    def _events(self) -> None:
        """Send the runs that changed, again and again, until the reader leaves or the server closes."""
        self.close_connection = True
        self._head(HTTPStatus.OK, "text/event-stream", None)
        marks: dict[str, object] = {}
        pause = 0.0
        while not self.server.closing.wait(pause):
            pause, text = self.server.every, ":\n\n"  # a comment: it fails once the reader has left
            if (runs := self.server.look()) is not None:
                before, marks = marks, {id: _mark(run) for id, run in runs.items()}
                if marks != before:
                    changed = {id: run for id, run in runs.items() if before.get(id) != marks[id]}
                    fresh = [view(run, f"files/{id}") for id, run in changed.items()]
                    text = f"event: runs\ndata: {json.dumps({'runs': fresh, 'order': list(runs)})}\n\n"
            self.wfile.write(text.encode())
            self.wfile.flush()

    def handle(self) -> None:
        with suppress(ConnectionError, TimeoutError):  # the reader has left
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Requests are nobody's news."""


class LiveServer(ThreadingHTTPServer):
    """Serves the page on 127.0.0.1 until it is shut down."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int, every: float = 1.0) -> None:
        self.paths, self.every = list(paths), every
        self.closing = threading.Event()
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise ConfigError(f"cannot listen on port {port}: {error.strerror}; choose another --port") from None

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def look(self) -> dict[str, FoundRun] | None:
        """Runs by id; None while a folder is being moved or written."""
        try:
            return {run.id: run for run in find(self.paths)}
        except (NTKFLError, OSError):
            return None
